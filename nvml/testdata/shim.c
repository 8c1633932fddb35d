// A stand-in for libnvidia-ml.so.1: the functions that the package calls,
// answering from a text file that a test rewrites while the library is in use.
//
//   gcc -shared -fPIC -I <go-nvml>/pkg/nvml -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 shim.c
//
// With -DOLD_DRIVER it has only the functions of an old driver.
//
// It stands in for the driver in tests of an agent and in an operator's
// rehearsal of a fault alike: build it, set FAKE_NVML in the agent's environment
// and the library's folder in LD_LIBRARY_PATH. scenarios/ has a file per fault.
//
// $FAKE_NVML names the scenario, one fact a line; # begins a comment, G is a GPU
// index. What no line says is not supported. A line that begins with @FROM-TO
// (ms since the file was last written, TO may be left out) holds only then: a
// touch of the file plays the scenario again.
//   include FILE              its lines stand here; of lines about one thing the first counts
//   gpus N                    driver TEXT    name TEXT
//   mem G TOTAL RESERVED FREE USED (bytes)      util G GPU% MEM%      temp G CELSIUS
//   clock G SM_MHZ MAX_MHZ    power G MILLIWATTS    throttle G HEXMASK
//   moving                    the power draw is never twice the same, as a real one
//   ecc G CORRECTED UNCORRECTED                 remap G PENDING FAILED   mig G 0|1
//   instance G I TOTAL RESERVED FREE USED       instance I of a GPU with mig 1
//   iprocess G I PID BYTES    a process on it
//   nvlink G LINK 0|1         peer G LINK KIND BUSID   KIND: 0 GPU, 1 CPU, 2 switch, 255 not told
//   fabric G STATE STATUS CLIQUE MASK CLUSTER   STATE: 0 none, 1 not started, 2 in progress, 3 completed; CLUSTER: 32 hex digits
//   p2p G H STATUS            NVLink from G to H; STATUS: 0 yes, 5 no, 6 unknown
//   ancestor G H LEVEL        0 board, 10 switch, 20 switches, 30 host bridge, 40 NUMA node, 50 system
//   pcie G GENERATION LANES   the link to the host: the highest generation, the lanes of now
//   process G PID BYTES (-1: unknown)
//   xid G CODE                a line that begins to hold fires once in a set that exists, in the
//                             file's order; G = -1: no GPU named
//   lost G                    the GPU fell off the bus
//   fail FUNCTION CODE        slow FUNCTION MILLISECONDS
//   print TEXT                written to standard output by nvmlInit_v2
//   pidfile PATH              the process id, written by nvmlInit_v2
#define NVML_NO_UNVERSIONED_FUNC_DEFS 1
#include "nvml.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_GPUS 16

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static int inits, xids_taken;
#define MAX_INSTANCES 7
// instance is -1 for a whole GPU.
static struct nvmlDevice_st { int index, instance; } devices[MAX_GPUS], parts[MAX_GPUS][MAX_INSTANCES];

static void sleep_ms(long n) {
  struct timespec t = {n / 1000, (n % 1000) * 1000000L};
  nanosleep(&t, NULL);
}

// scan looks for the nth line that starts with key in a file and those it
// includes, counting nth down, and copies what follows the key.
static int scan(const char *path, const char *key, int *nth, char *rest, size_t cap, int depth) {
  FILE *f = path && depth < 4 ? fopen(path, "r") : NULL;
  char b[512], other[1024];
  size_t k = strlen(key);
  int hit = 0;
  if (!f) return 0;
  struct stat st = {0};
  struct timespec now;
  fstat(fileno(f), &st);
  clock_gettime(CLOCK_REALTIME, &now);
  long long age = (now.tv_sec - st.st_mtim.tv_sec) * 1000LL + (now.tv_nsec - st.st_mtim.tv_nsec) / 1000000;
  if (age < 0) age = 0;
  while (!hit && fgets(b, sizeof b, f)) {
    char *s = b;
    long long from = 0, to = -1;
    int n = 0;
    b[strcspn(b, "#\n")] = 0;
    if (*s == '@') {
      sscanf(s, "@%lld-%n", &from, &n);
      s += n;
      if (*s != ' ') to = strtoll(s, &s, 10);
      s += strspn(s, " ");
      if (age < from || (to >= 0 && age >= to)) continue;
    }
    if (!strncmp(s, "include ", 8)) {
      const char *slash = strrchr(path, '/');
      snprintf(other, sizeof other, "%.*s%s", s[8] == '/' || !slash ? 0 : (int)(slash - path) + 1, path, s + 8);
      hit = scan(other, key, nth, rest, cap, depth + 1);
      continue;
    }
    if (strncmp(s, key, k) || (s[k] != ' ' && s[k] != 0) || (*nth)-- > 0) continue;
    snprintf(rest, cap, "%s", s[k] ? s + k + 1 : "");
    hit = 1;
  }
  fclose(f);
  return hit;
}

// line finds the nth line that starts with key and copies what follows it.
static int line(const char *key, int nth, char *rest, size_t cap) {
  return scan(getenv("FAKE_NVML"), key, &nth, rest, cap, 0);
}

// row finds the nth line of key for a GPU and copies what follows the index.
static int row(const char *key, int gpu, int nth, char *rest, size_t cap) {
  int g, n;
  for (int i = 0; line(key, i, rest, cap); i++) {
    if (sscanf(rest, "%d%n", &g, &n) != 1 || g != gpu || nth-- > 0) continue;
    memmove(rest, rest + n, strlen(rest + n) + 1);
    return 1;
  }
  return 0;
}

// gate is the scripted delay and failure of a function.
static nvmlReturn_t gate(const char *function) {
  char b[256], name[128];
  int v;
  for (int n = 0; line("slow", n, b, sizeof b); n++)
    if (sscanf(b, "%127s %d", name, &v) == 2 && !strcmp(name, function)) sleep_ms(v);
  for (int n = 0; line("fail", n, b, sizeof b); n++)
    if (sscanf(b, "%127s %d", name, &v) == 2 && !strcmp(name, function)) return (nvmlReturn_t)v;
  return inits > 0 || !strncmp(function, "nvmlInit", 8) ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

#define GATE                          \
  nvmlReturn_t r_ = gate(__func__);   \
  if (r_ != NVML_SUCCESS) return r_
// What is not about memory, names and processes no instance supports.
#define DEVICE_OR_INSTANCE(d)         \
  GATE;                               \
  char b[256];                        \
  int g = (d).handle->index, part = (d).handle->instance; \
  (void)part;                         \
  if (row("lost", g, 0, b, sizeof b)) return NVML_ERROR_GPU_IS_LOST
#define DEVICE(d)                     \
  DEVICE_OR_INSTANCE(d);              \
  if (part >= 0) return NVML_ERROR_NOT_SUPPORTED
#define ROW(key) \
  if (!row(key, g, 0, b, sizeof b)) return NVML_ERROR_NOT_SUPPORTED
#define SCAN(n, ...) return sscanf(b, __VA_ARGS__) == (n) ? NVML_SUCCESS : NVML_ERROR_UNKNOWN

API nvmlReturn_t nvmlInit_v2(void) {
  char b[256];
  if (line("pidfile", 0, b, sizeof b)) {
    FILE *f = fopen(b, "w");
    if (f) fprintf(f, "%d\n", getpid()), fclose(f);
  }
  if (line("print", 0, b, sizeof b)) puts(b), fflush(stdout);
  GATE;
  pthread_mutex_lock(&mu);
  inits++;
  for (int i = 0; i < MAX_GPUS; i++) {
    devices[i].index = i, devices[i].instance = -1;
    for (int k = 0; k < MAX_INSTANCES; k++) parts[i][k].index = i, parts[i][k].instance = k;
  }
  pthread_mutex_unlock(&mu);
  return NVML_SUCCESS;
}
API const char *nvmlErrorString(nvmlReturn_t r) { return r == NVML_SUCCESS ? "Success" : "fake error"; }
API nvmlReturn_t nvmlSystemGetDriverVersion(char *s, unsigned n) {
  GATE;
  char b[128] = "580.00.00";
  line("driver", 0, b, sizeof b);
  snprintf(s, n, "%s", b);
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *c) {
  GATE;
  char b[64];
  *c = line("gpus", 0, b, sizeof b) ? (unsigned)atoi(b) : 0;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *d) {
  GATE;
  char b[64];
  if (i >= MAX_GPUS) return NVML_ERROR_INVALID_ARGUMENT;
  if (row("lost", i, 0, b, sizeof b)) return NVML_ERROR_GPU_IS_LOST;
  d->handle = &devices[i];
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *s, unsigned n) {
  DEVICE_OR_INSTANCE(d);
  if (part >= 0)
    snprintf(s, n, "MIG-00000000-0000-0000-%04d-%012d", part, g);
  else
    snprintf(s, n, "GPU-00000000-0000-0000-0000-%012d", g);
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *s, unsigned n) {
  DEVICE_OR_INSTANCE(d);
  char name[128] = "Fake H200";
  line("name", 0, name, sizeof name);
  snprintf(s, n, part >= 0 ? "%s MIG 1g.18gb" : "%s", name);
  return NVML_SUCCESS;
}
// instance finds the line of key about an instance and copies what follows the
// instance's index.
static int instance(const char *key, int gpu, int part, int nth, char *rest, size_t cap) {
  int k, n;
  for (int i = 0; row(key, gpu, i, rest, cap); i++) {
    if (sscanf(rest, "%d%n", &k, &n) != 1 || k != part || nth-- > 0) continue;
    memmove(rest, rest + n, strlen(rest + n) + 1);
    return 1;
  }
  return 0;
}
#define MEMORY_ROW \
  if (part >= 0 ? !instance("instance", g, part, 0, b, sizeof b) : !row("mem", g, 0, b, sizeof b)) return NVML_ERROR_NOT_SUPPORTED

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) {
  DEVICE_OR_INSTANCE(d);
  unsigned long long reserved;
  MEMORY_ROW;
  int n = sscanf(b, "%llu %llu %llu %llu", &m->total, &reserved, &m->free, &m->used);
  m->used += reserved;  // the first version of the query counts it in
  return n == 4 ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}
API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u) {
  DEVICE(d);
  ROW("util");
  SCAN(2, "%u %u", &u->gpu, &u->memory);
}
API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, nvmlTemperatureSensors_t s, unsigned *t) {
  DEVICE(d);
  (void)s;
  ROW("temp");
  SCAN(1, "%u", t);
}
API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t d, nvmlClockType_t type, unsigned *mhz) {
  DEVICE(d);
  if (type != NVML_CLOCK_SM) return NVML_ERROR_INVALID_ARGUMENT;
  ROW("clock");
  SCAN(1, "%u", mhz);
}
API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t d, nvmlClockType_t type, unsigned *mhz) {
  DEVICE(d);
  if (type != NVML_CLOCK_SM) return NVML_ERROR_INVALID_ARGUMENT;
  ROW("clock");
  SCAN(1, "%*u %u", mhz);
}
API nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t d, unsigned *generation) {
  DEVICE(d);
  ROW("pcie");
  SCAN(1, "%u", generation);
}
API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t d, unsigned *lanes) {
  DEVICE(d);
  ROW("pcie");
  SCAN(1, "%*u %u", lanes);
}
API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned *mw) {
  DEVICE(d);
  ROW("power");
  static unsigned moves;
  char none[8];
  if (sscanf(b, "%u", mw) != 1) return NVML_ERROR_UNKNOWN;
  if (line("moving", 0, none, sizeof none)) *mw += ++moves % 1000;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t d, nvmlMemoryErrorType_t e, nvmlEccCounterType_t c, unsigned long long *n) {
  DEVICE(d);
  unsigned long long counts[2];
  if (c != NVML_VOLATILE_ECC) return NVML_ERROR_INVALID_ARGUMENT;
  ROW("ecc");
  if (sscanf(b, "%llu %llu", &counts[0], &counts[1]) != 2) return NVML_ERROR_UNKNOWN;
  *n = counts[e == NVML_MEMORY_ERROR_TYPE_UNCORRECTED];
  return NVML_SUCCESS;
}
static nvmlReturn_t throttle(int g, unsigned long long *mask) {
  char b[256];
  *mask = row("throttle", g, 0, b, sizeof b) ? strtoull(b, NULL, 16) : 0;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t d, unsigned link, nvmlEnableState_t *s) {
  DEVICE(d);
  unsigned k, up;
  for (int i = 0; row("nvlink", g, i, b, sizeof b); i++) {
    if (sscanf(b, "%u %u", &k, &up) != 2 || k != link) continue;
    *s = up ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_SUPPORTED;
}
static nvmlReturn_t processes(int g, int part, unsigned *count, nvmlProcessInfo_t *infos) {
  char b[256];
  unsigned n = 0, pid;
  long long bytes;
  for (; part >= 0 ? instance("iprocess", g, part, n, b, sizeof b) : row("process", g, n, b, sizeof b); n++) {
    if (n >= *count) continue;
    if (sscanf(b, "%u %lld", &pid, &bytes) != 2) return NVML_ERROR_UNKNOWN;
    infos[n] = (nvmlProcessInfo_t){pid, bytes < 0 ? (unsigned long long)NVML_VALUE_NOT_AVAILABLE : (unsigned long long)bytes, ~0u, ~0u};
  }
  unsigned room = *count;
  *count = n;
  return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#ifdef OLD_DRIVER
API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t d, nvmlPciInfo_t *p) {
  DEVICE(d);
  memset(p, 0, sizeof *p);
  snprintf(p->busIdLegacy, sizeof p->busIdLegacy, "0000:%02X:00.0", 0x1b + g);
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t d, unsigned long long *mask) {
  DEVICE(d);
  return throttle(g, mask);
}
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_v2_t *infos) {
  DEVICE_OR_INSTANCE(d);
  return processes(g, part, count, infos);
}
#else
API nvmlReturn_t nvmlSystemGetNVMLVersion(char *s, unsigned n) {
  GATE;
  snprintf(s, n, "13.580.00.00");
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *p) {
  DEVICE(d);
  memset(p, 0, sizeof *p);
  snprintf(p->busId, sizeof p->busId, "00000000:%02X:00.0", 0x1b + g);
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *m) {
  DEVICE_OR_INSTANCE(d);
  if (m->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  MEMORY_ROW;
  SCAN(4, "%llu %llu %llu %llu", &m->total, &m->reserved, &m->free, &m->used);
}
API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t d, nvmlTemperature_t *t) {
  DEVICE(d);
  if (t->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  ROW("temp");
  SCAN(1, "%d", &t->temperature);
}
API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t d, unsigned long long *mask) {
  DEVICE(d);
  return throttle(g, mask);
}
API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  DEVICE(d);
  *corrected = *uncorrected = 0;
  ROW("remap");
  SCAN(2, "%u %u", pending, failed);
}
API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *current, unsigned *pending) {
  DEVICE(d);
  ROW("mig");
  *pending = 0;
  SCAN(1, "%u", current);
}
API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned *count) {
  DEVICE(d);
  *count = MAX_INSTANCES;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned i, nvmlDevice_t *m) {
  DEVICE(d);
  if (i >= MAX_INSTANCES) return NVML_ERROR_INVALID_ARGUMENT;
  if (!instance("instance", g, i, 0, b, sizeof b)) return NVML_ERROR_NOT_FOUND;
  m->handle = &parts[g][i];
  return NVML_SUCCESS;
}
// peer finds what a link that is up leads to.
static int peer(int g, unsigned link, unsigned *kind, char *bus, size_t cap) {
  char b[256], name[64] = "";
  unsigned k;
  for (int i = 0; row("peer", g, i, b, sizeof b); i++) {
    if (sscanf(b, "%u %u %63s", &k, kind, name) < 2 || k != link) continue;
    snprintf(bus, cap, "%s", name);
    return 1;
  }
  return 0;
}
API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t d, unsigned link, nvmlIntNvLinkDeviceType_t *type) {
  DEVICE(d);
  unsigned kind;
  if (!peer(g, link, &kind, b, sizeof b)) return NVML_ERROR_NOT_SUPPORTED;
  *type = kind;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t d, unsigned link, nvmlPciInfo_t *p) {
  DEVICE(d);
  unsigned kind;
  memset(p, 0, sizeof *p);
  if (!peer(g, link, &kind, b, sizeof b) || !*b) return NVML_ERROR_NOT_SUPPORTED;
  snprintf(p->busId, sizeof p->busId, "%.31s", b);
  return NVML_SUCCESS;
}
// pair finds the line of key about two GPUs.
static int pair(const char *key, int g, int other, int *v) {
  char b[256];
  int to;
  for (int i = 0; row(key, g, i, b, sizeof b); i++)
    if (sscanf(b, "%d %d", &to, v) == 2 && to == other) return 1;
  return 0;
}
API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t d, nvmlDevice_t to, nvmlGpuP2PCapsIndex_t what, nvmlGpuP2PStatus_t *s) {
  DEVICE(d);
  int v;
  if (what != NVML_P2P_CAPS_INDEX_NVLINK) return NVML_ERROR_INVALID_ARGUMENT;
  if (!pair("p2p", g, to.handle->index, &v)) return NVML_ERROR_NOT_SUPPORTED;
  *s = v;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t d, nvmlDevice_t to, nvmlGpuTopologyLevel_t *level) {
  DEVICE(d);
  int v;
  if (!pair("ancestor", g, to.handle->index, &v)) return NVML_ERROR_NOT_SUPPORTED;
  *level = v;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t d, nvmlGpuFabricInfoV_t *info) {
  DEVICE(d);
  nvmlGpuFabricInfo_v2_t *v2 = (nvmlGpuFabricInfo_v2_t *)info;
  unsigned state, status, clique, mask;
  char cluster[64] = "";
  if (v2->version != nvmlGpuFabricInfo_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  ROW("fabric");
  if (sscanf(b, "%u %u %u %x %63s", &state, &status, &clique, &mask, cluster) < 4) return NVML_ERROR_UNKNOWN;
  memset(v2->clusterUuid, 0, sizeof v2->clusterUuid);
  for (unsigned i = 0, byte; i < sizeof v2->clusterUuid && sscanf(cluster + 2 * i, "%2x", &byte) == 1; i++) v2->clusterUuid[i] = byte;
  v2->state = state, v2->status = status, v2->cliqueId = clique, v2->healthMask = mask;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_t *infos) {
  DEVICE_OR_INSTANCE(d);
  return processes(g, part, count, infos);
}
API nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_t *infos) {
  DEVICE_OR_INSTANCE(d);
  (void)infos;
  *count = 0;
  return NVML_SUCCESS;
}
#endif

API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *types) {
  DEVICE(d);
  *types = nvmlEventTypeXidCriticalError;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *s) {
  GATE;
  char b[64];
  s->handle = calloc(1, 8);
  while (line("xid", xids_taken, b, sizeof b)) xids_taken++;  // events of before are not told again
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t s) {
  DEVICE(d);
  (void)s;
  return types == nvmlEventTypeXidCriticalError ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}
API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t s, nvmlEventData_t *e, unsigned timeout) {
  GATE;
  (void)s;
  char b[128];
  int g;
  unsigned long long xid;
  for (unsigned waited = 0;; waited += 5) {
    pthread_mutex_lock(&mu);
    int have = line("xid", xids_taken, b, sizeof b);
    if (have) xids_taken++;
    pthread_mutex_unlock(&mu);
    if (have && sscanf(b, "%d %llu", &g, &xid) == 2) {
      memset(e, 0, sizeof *e);
      if (g >= 0) e->device.handle = &devices[g % MAX_GPUS];
      e->eventType = nvmlEventTypeXidCriticalError;
      e->eventData = xid;
      return NVML_SUCCESS;
    }
    if (waited >= timeout) return NVML_ERROR_TIMEOUT;
    sleep_ms(5);
  }
}
