package testbed

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// faults are the faults of comparable systems about load, hot spots, workers,
// GPUs, topology, tenants, events, the truth of a view, the identity of blocks and
// tokens and discovery, by the names that they are listed under, and the tests
// that show what is done about each.
var faults = []struct {
	name string
	// tests are a package's directory and a test in it.
	tests [][2]string
}{
	{"LOD-01", [][2]string{{"coordinator/placement", "TestLOD01MissingLoadIsNotZero"}, {"coordinator/fleet", "TestSpreadWithoutMetrics"}}},
	{"LOD-02", [][2]string{{"coordinator/placement", "TestLOD02BurstSpreads"}, {"coordinator/fleet", "TestBurstSpreads"}}},
	{"LOD-03", [][2]string{{"coordinator/fleet", "TestReturningWorkerStartsAtZero"}}},
	{"LOD-04", [][2]string{{"coordinator/placement", "TestLOD04TiesSpread"}}},
	{"LOD-05", [][2]string{{"coordinator/placement", "TestPrefixCreditStaysWithItsRole"}}},
	{"LOD-06", [][2]string{{"coordinator/fleet", "TestReservationsEnd"}, {"agent/queue", "TestClaimsWithoutRequestsEnd"}, {"testbed/cluster", "TestClaimThatIsNeverSent"}}},
	{"LOD-07", [][2]string{{"coordinator/placement", "TestLOD07FullPoolLoses"}}},
	{"LOD-10", [][2]string{{"coordinator/fleet", "TestMarks"}}},
	{"LOD-13", [][2]string{{"coordinator/placement", "TestLOD13UnknownAttractsNoHerd"}, {"coordinator/fleet", "TestUnreadableWorkerIsNoMagnet"}}},
	{"HOT-01", [][2]string{{"coordinator/placement", "TestHOT01HotPrefixSpreads"}}},
	{"HOT-02", [][2]string{{"coordinator/fleet", "TestHOT02CoordinatorsDoNotHerd"}, {"testbed/cluster", "TestPlacementIsSeenBeforeTheNextReport"}}},
	{"HOT-03", [][2]string{{"coordinator/placement", "TestHOT03RepeatsStay"}}},
	{"HOT-04", [][2]string{{"coordinator/placement", "TestHOT04AllOverLimit"}}},
	{"HOT-05", [][2]string{{"coordinator/placement", "TestNextBestHolder"}}},
	{"HOT-06", [][2]string{{"coordinator/placement", "TestHOT06NewWorkerIsBroughtIn"}}},
	{"HOT-07", [][2]string{{"coordinator/placement", "TestHOT07DecidingTermIsNamed"}, {"coordinator", "TestHOT07BypassedCacheIsShown"}, {"coordinator/explain", "TestSummaryAndPart"}}},
	{"HOT-10", [][2]string{{"coordinator/placement", "TestCacheDecidesAmongEquals"}}},
	{"WRK-01", [][2]string{{"agent/queue", "TestStalled"}, {"testbed/cluster", "TestStalledEngine"}}},
	{"WRK-02", [][2]string{{"agent/queue", "TestStalled"}, {"testbed/cluster", "TestStalledEngine"}}},
	{"WRK-03", [][2]string{{"coordinator/outcome", "TestOnlyWorkerFaultsCount"}, {"testbed/cluster", "TestFailFastWorkerIsNoMagnet"}}},
	{"WRK-04", [][2]string{{"coordinator/outcome", "TestBreakerOpensOnFaultsAndProbes"}, {"testbed/cluster", "TestFailFastWorkerIsNoMagnet"}}},
	{"WRK-05", [][2]string{{"coordinator/placement", "TestWRK05Continuation"}, {"testbed/cluster", "TestSameRequestSameAnswer"}}},
	{"WRK-06", [][2]string{{"testbed/cluster", "TestWRK06DrainCountsDown"}, {"coordinator/ctl", "TestDrainShowsWhatStillRuns"}}},
	{"WRK-07", [][2]string{{"coordinator/placement", "TestWRK07WillAndGuess"}}},
	{"WRK-08", [][2]string{{"coordinator/placement", "TestLosingAWorkerMovesOnlyItsRequests"}}},
	{"WRK-12", [][2]string{{"coordinator/fleet", "TestLostEngineEndsItsClaims"}, {"testbed/cluster", "TestEngineRestartEndsItsClaims"}}},
	{"WRK-13", [][2]string{{"coordinator/placement", "TestWRK13TheOnlyWorkerStarts"}}},
	{"TOP-01", [][2]string{{"coordinator/registry", "TestPathBetween"}}},
	{"TOP-02", [][2]string{{"coordinator/placement", "TestPriceTransfer"}}},
	{"TOP-03", [][2]string{{"coordinator/placement", "TestTOP03SwitchPoint"}}},
	{"TOP-04", [][2]string{{"agent/host", "TestTOP04UnknownNUMANodes"}, {"coordinator", "TestTOP04NUMANote"}}},
	{"GPU-01", [][2]string{{"nvml", "TestGPU01UnifiedMemoryIsUnknown"}, {"agent", "TestForeignMemoryAndHeadroom"}}},
	{"GPU-02", [][2]string{{"agent", "TestGPU02VerdictMetricFades"}, {"nvml", "TestXidsOutliveTheAgentNotTheBoot"}, {"testbed/cluster", "TestGPU02XidsDecideAndAreAcknowledged"}}},
	{"GPU-03", [][2]string{{"nvml", "TestGPU03FrozenReadingsAreNotCurrent"}, {"nvml", "TestViewStale"}}},
	{"GPU-04", [][2]string{{"nvml", "TestGPU04WithoutLibrary"}, {"nvml", "TestPlainBuild"}}},
	{"GPU-05", [][2]string{{"nvml", "TestGPU05VersionMismatchIsNamed"}}},
	{"GPU-06", [][2]string{{"nvml", "TestGPU06CorrectedErrorsAreNotFatal"}}},
	{"GPU-07", [][2]string{{"nvml", "TestGPU07VirtualMachine"}}},
	{"GPU-08", [][2]string{{"nvml", "TestRealBindingHungCall"}, {"nvml", "TestClientUnkillableChild"}, {"testbed/cluster", "TestGPU08HungDriverStopsNothing"}}},
	{"GPU-09", [][2]string{{"nvml", "TestGPU09DriverLateAtBoot"}}},
	{"GPU-10", [][2]string{{"nvml", "TestGPU10MIGInstancesAreListed"}}},
	{"GPU-11", [][2]string{{"nvml", "TestGPU11OldDriver"}}},
	{"TOP-06", [][2]string{{"coordinator/placement", "TestTOP06SlowPairCostsMore"}}},
	{"TEN-01", [][2]string{{"testbed/cluster", "TestSaltsAndAdaptersAreDomainsOfTheirOwn"}}},
	{"TEN-02", [][2]string{{"testbed/cluster", "TestSaltsAndAdaptersAreDomainsOfTheirOwn"}, {"coordinator/registry", "TestSaltsBelongToTheirTenant"}}},
	{"TEN-03", [][2]string{{"agent/engine/kvevents", "TestTEN03PicturesAreNotShared"}, {"agent/engine/kvevents", "TestExtraKeys"}}},
	{"TEN-04", [][2]string{{"coordinator/placement", "TestTranscripts"}}},
	{"TEN-06", [][2]string{{"agent/engine/kvevents", "TestExtraKeys"}, {"gossip/boundary", "TestRule"}}},
	{"EVT-01", [][2]string{{"agent/engine/kvevents", "TestEVT01RestartBeginsAgain"}, {"agent/engine/vllm", "TestRestartWithEqualHashes"}, {"testbed/cluster", "TestEngineRestart"}}},
	{"EVT-02", [][2]string{{"agent/engine/kvevents", "TestReplayRequestsAreBounded"}}},
	{"EVT-03", [][2]string{{"agent/engine/kvevents", "TestEVT03OneLostBatch"}, {"testbed/cluster", "TestLostEvents"}}},
	{"EVT-04", [][2]string{{"agent/engine/kvevents", "TestEVT04LateJoinIsPartial"}, {"testbed/cluster", "TestEVT04LateAgentSeesInPart"}}},
	{"EVT-05", [][2]string{{"agent/blocktable", "TestEVT05UnknownRemovalInABatch"}}},
	{"EVT-06", [][2]string{{"agent/engine/kvevents", "TestEVT06JumpWithoutReplay"}, {"testbed/cluster", "TestLostEvents"}}},
	{"EVT-07", [][2]string{{"agent/engine/kvevents", "TestEVT07LongHistory"}}},
	{"EVT-08", [][2]string{{"agent/blocktable", "TestEVT08OrphansWaitForTheirParent"}}},
	{"EVT-09", [][2]string{{"agent/blocktable", "TestEVT09TokensOfAnotherSpan"}}},
	{"EVT-10", [][2]string{{"agent/engine/kvevents", "TestEVT10LossIsMeasured"}}},
	{"TRU-01", [][2]string{{"agent/engine/kvevents", "TestTRU01ClearTakesEffectAtOnce"}, {"agent/engine/vllm", "TestSleepClears"}, {"testbed/cluster", "TestCacheClear"}, {"testbed/cluster", "TestTRU01SleepingEngineGetsNothing"}}},
	{"TRU-02", [][2]string{{"agent/blocktable", "TestTRU02TwoCopiesOfABlock"}}},
	{"TRU-03", [][2]string{{"coordinator/fleet", "TestReportAges"}, {"coordinator/placement", "TestTRU03CreditEndsWithoutContact"}, {"coordinator/fleet", "TestAway"}}},
	{"TRU-04", [][2]string{{"agent/engine/vllm", "TestRestartByStartTime"}, {"testbed/cluster", "TestEngineRestart"}}},
	{"TRU-05", [][2]string{{"agent/engine/kvevents", "TestTRU05UnknownTierIsNotGPU"}, {"testbed/cluster", "TestTRU05TierThatIsNotTold"}}},
	{"TRU-06", [][2]string{{"agent/blocktable", "TestTRU06OnlyTheUnbrokenRunCounts"}}},
	{"TRU-07", [][2]string{{"gossip/accuracy", "TestTrustFallsWithErrorsAndReturns"}, {"coordinator", "TestTRU07DisagreementIsShownAndRepaired"}}},
	{"TRU-10", [][2]string{{"testbed/cluster", "TestAgentRestart"}}},
	{"TRU-11", [][2]string{{"coordinator", "TestTRU07DisagreementIsShownAndRepaired"}, {"coordinator", "TestDistrustAsksForAllOfAView"}, {"agent/engine/vllm", "TestResync"}}},
	{"IDN-01", [][2]string{{"agent/blocktable", "TestIDN01TokensNotBlocks"}, {"coordinator/placement", "TestIDN01MoreTokensInFewerBlocksWin"}}},
	{"IDN-02", [][2]string{{"agent", "TestIDN02BlockSizeIsTheEnginesWord"}}},
	{"IDN-03", [][2]string{{"agent/engine/vllm", "TestIDN03SilentRanks"}, {"agent/engine/kvevents", "TestWrongRank"}}},
	{"IDN-04", [][2]string{{"agent/engine/vllm", "TestTwoRanksAreTwoWorkers"}, {"testbed/cluster", "TestTwoRanksBehindOnePortAreTwoWorkers"}}},
	{"IDN-05", [][2]string{{"agent/discover", "TestWrongFlagsAreNamedWithTheFix"}, {"agent/engine/vllm", "TestNoEventsIsSaid"}, {"agent/engine/kvevents", "TestWorkWithoutEvents"}, {"agent", "TestSelfTest"}, {"agent", "TestBoundaryDifferencesAreNamed"}, {"testbed/cluster", "TestSelfTestOnConnect"}}},
	{"IDN-06", [][2]string{{"agent/engine/kvevents", "TestIDN06TakenPort"}}},
	{"IDN-07", [][2]string{{"agent/blocktable", "TestIDN07BlockSizesOfTiersAreNotAdded"}, {"coordinator/placement", "TestTranscripts"}, {"testbed/cluster", "TestIDN07HostMemoryHasItsPrice"}}},
	{"DSC-01", [][2]string{{"coordinator/fleet", "TestDSC01MissedDeparture"}, {"coordinator/fleet", "TestWorkersThatAreListedNoMore"}}},
	{"DSC-02", [][2]string{{"agent", "TestDSC02EngineMovesToAnotherPort"}, {"coordinator/fleet", "TestDSC02ChangedAddressIsGivenOut"}}},
	{"DSC-03", [][2]string{{"agent/discover", "TestDSC03TwoContainersBothProcessOne"}, {"agent", "TestDSC03ProcessMarksOfEqualLives"}}},
	{"DSC-04", [][2]string{{"testbed/cluster", "TestCoordinatorRestart"}, {"testbed/cluster", "TestProcessesSurviveTheirLeader"}, {"testbed/cluster", "TestDSC04AllCoordinatorsRestart"}}},
	{"DSC-05", [][2]string{{"testbed/cluster", "TestDSC05StoppedAgentComesBackAsItself"}}},
	{"DSC-08", [][2]string{{"coordinator/registry", "TestDSC08SilenceShorterThanTheRhythm"}}},
	{"IDN-11", [][2]string{{"agent/engine/kvevents", "TestIDN11OddMessages"}}},
	{"TOK-01", [][2]string{{"agent", "TestBoundaryDifferencesAreNamed"}, {"coordinator", "TestAnotherBoundaryEarnsNoCredit"}}},
	{"TOK-02", [][2]string{{"coordinator", "TestPromptAndMessagesAreDifferentRenderings"}, {"coordinator", "TestTextIsUnknownUntilItIsTaught"}}},
	{"TOK-03", [][2]string{{"agent/blocktable", "TestTOK03PromptsShorterThanABlock"}, {"coordinator/placement", "TestTOK03ShorterThanABlock"}}},
	{"TOK-04", [][2]string{{"agent/blocktable", "TestTOK04SmallestCacheableUnit"}}},
}

// numbers are those of the faults of each kind; a number that is left out was
// withdrawn.
var numbers = map[string][]int{
	"LOD": {1, 2, 3, 4, 5, 6, 7, 10, 13}, "HOT": {1, 2, 3, 4, 5, 6, 7, 10}, "WRK": {1, 2, 3, 4, 5, 6, 7, 8, 12, 13}, "TOP": {1, 2, 3, 4, 6},
	"EVT": {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, "TRU": {1, 2, 3, 4, 5, 6, 7, 10, 11}, "IDN": {1, 2, 3, 4, 5, 6, 7, 11}, "TOK": {1, 2, 3, 4},
	"TEN": {1, 2, 3, 4, 6}, "DSC": {1, 2, 3, 4, 5, 8}, "GPU": {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
}

// No fault of a kind is left out.
func TestEveryKnownFaultIsListed(t *testing.T) {
	listed := map[string]bool{}
	for _, f := range faults {
		listed[f.name] = true
	}
	for kind, list := range numbers {
		for _, n := range list {
			name := fmt.Sprintf("%s-%02d", kind, n)
			if !listed[name] {
				t.Errorf("%s is not listed", name)
			}
			delete(listed, name)
		}
	}
	for name := range listed {
		t.Errorf("%s is listed and unknown", name)
	}
}

// Each fault that is listed has the tests that are named for it.
func TestEveryListedFaultHasItsTest(t *testing.T) {
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	tests := map[string]map[string]bool{}
	listed := map[string]bool{}
	for _, f := range faults {
		if listed[f.name] || len(f.tests) == 0 {
			t.Errorf("%s is listed twice, or with no test", f.name)
		}
		listed[f.name] = true
		for _, test := range f.tests {
			dir, name := test[0], test[1]
			if tests[dir] == nil {
				tests[dir] = map[string]bool{}
				files, err := filepath.Glob(filepath.Join("..", dir, "*_test.go"))
				if err != nil {
					t.Fatal(err)
				}
				for _, file := range files {
					text, err := os.ReadFile(file)
					if err != nil {
						t.Fatal(err)
					}
					for _, m := range declared.FindAllStringSubmatch(string(text), -1) {
						tests[dir][m[1]] = true
					}
				}
			}
			if !tests[dir][name] {
				t.Errorf("%s: there is no %s in %s", f.name, name, dir)
			}
		}
	}
	// A test that bears the name of a fault is listed under it.
	for dir, names := range tests {
		for name := range names {
			m := regexp.MustCompile(`^Test(LOD|HOT|WRK|TOP|TEN|EVT|TRU|IDN|TOK|DSC|GPU)(\d\d)`).FindStringSubmatch(name)
			if m != nil && !listed[strings.Join(m[1:], "-")] {
				t.Errorf("%s in %s is not listed", name, dir)
			}
		}
	}
}
