package prefixindex

// RaceEnabled tells tests from outside the package.
const RaceEnabled = raceEnabled
