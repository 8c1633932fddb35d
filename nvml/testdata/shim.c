// A stand-in for libnvidia-ml.so.1: the functions that the package calls,
// answering from a text file that a test rewrites while the library is in use.
//
//   gcc -shared -fPIC -I <go-nvml>/pkg/nvml -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 shim.c
//
// With -DOLD_DRIVER it has only the functions of an old driver.
//
// $FAKE_NVML names the file, one fact a line; G is a GPU index:
//   gpus N                    driver TEXT
//   mem G TOTAL RESERVED FREE USED (bytes)      util G GPU% MEM%      temp G CELSIUS
//   clock G SM_MHZ MAX_MHZ    power G MILLIWATTS    throttle G HEXMASK
//   ecc G CORRECTED UNCORRECTED                 remap G PENDING FAILED   mig G 0|1
//   nvlink G LINK 0|1         process G PID BYTES (-1: unknown)
//   xid G CODE                a new line fires once in a set that exists; G = -1: no GPU named
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
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_GPUS 16

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static int inits, xids_taken;
static struct nvmlDevice_st { int index; } devices[MAX_GPUS];

static void sleep_ms(long n) {
  struct timespec t = {n / 1000, (n % 1000) * 1000000L};
  nanosleep(&t, NULL);
}

// line finds the nth line that starts with key and copies what follows it.
static int line(const char *key, int nth, char *rest, size_t cap) {
  const char *path = getenv("FAKE_NVML");
  FILE *f = path ? fopen(path, "r") : NULL;
  char b[512];
  size_t k = strlen(key);
  int hit = 0;
  if (!f) return 0;
  while (!hit && fgets(b, sizeof b, f)) {
    if (strncmp(b, key, k) || b[k] != ' ' || nth-- > 0) continue;
    snprintf(rest, cap, "%s", b + k + 1);
    rest[strcspn(rest, "\n")] = 0;
    hit = 1;
  }
  fclose(f);
  return hit;
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
#define DEVICE(d)                     \
  GATE;                               \
  char b[256];                        \
  int g = (d).handle->index;          \
  if (row("lost", g, 0, b, sizeof b)) return NVML_ERROR_GPU_IS_LOST
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
  for (int i = 0; i < MAX_GPUS; i++) devices[i].index = i;
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
  DEVICE(d);
  snprintf(s, n, "GPU-00000000-0000-0000-0000-%012d", g);
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *s, unsigned n) {
  DEVICE(d);
  snprintf(s, n, "Fake H200");
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) {
  DEVICE(d);
  unsigned long long reserved;
  ROW("mem");
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
API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned *mw) {
  DEVICE(d);
  ROW("power");
  SCAN(1, "%u", mw);
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
static nvmlReturn_t processes(int g, unsigned *count, nvmlProcessInfo_t *infos) {
  char b[256];
  unsigned n = 0, pid;
  long long bytes;
  for (; row("process", g, n, b, sizeof b); n++) {
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
  DEVICE(d);
  return processes(g, count, infos);
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
  DEVICE(d);
  if (m->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  ROW("mem");
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
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_t *infos) {
  DEVICE(d);
  return processes(g, count, infos);
}
API nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_t *infos) {
  DEVICE(d);
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
