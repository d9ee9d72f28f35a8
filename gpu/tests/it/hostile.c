/* A management library whose answers cannot be believed. MODE chooses which
 * of them; everything else is as it should be, so that the answer is reached. */

#include <stdint.h>
#include <string.h>

#ifndef MODE
#define MODE 0
#endif

enum {
    HONEST = 0,
    ONLY_INIT = 1,      /* no other function, not even nvmlShutdown */
    ALWAYS_999 = 2,     /* after init every call fails with 999 */
    MANY_GPUS = 3,      /* 4 billion GPUs */
    ODD_ADDRESS = 4,    /* an address without an end */
    ODD_MODE = 5,       /* MIG mode 77 */
    MANY_PLACEMENTS = 6,
    FAR_PLACEMENT = 7,  /* beyond any memory slice */
    MANY_INSTANCES = 8,
    NULL_INSTANCES = 9,
    ENDLESS_TEXTS = 10, /* no text has a NUL */
    MANY_PROCESSES = 11,
    ELSEWHERE = 12,     /* creates at another placement */
    LEFTOVER = 13,      /* creates, cannot describe and cannot destroy it */
    NO_UUID = 14,       /* an empty UUID of a compute instance */
    OVERFULL_PLACEMENTS = 15, /* more placements than were asked room for */
    ODD_NUMBERS = 16,   /* every enum and count is all ones */
    ONE_BAD_GPU = 17,   /* the second of three has fallen off the bus */
    DRIVER_GONE = 18    /* the driver is unloaded under the library */
};

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { u32 start, size; } placement;
typedef struct { u32 version, id, slices, max, sm, ce, dec, enc, jpg, ofa; u64 memory; char name[96]; u32 caps; } info_v3;
typedef struct { void *device; u32 id, profile; placement place; } gi_info;
typedef struct { u32 id, slices, max, sm, ce, dec, enc, jpg, ofa; } ci_profile;
typedef struct { void *device, *gi; u32 id, profile; placement place; } ci_info;
typedef struct { u32 pid; u64 memory; u32 gi, ci; } process;
typedef struct { void *device; u64 type, data; u32 gi, ci; } event;
typedef struct { u32 version; unsigned char cluster[16]; u32 status, clique; unsigned char state; u32 health; } fabric_v2;
typedef struct { u32 version; u64 total, reserved, free, used; } memory_v2;

#define HANDLE(number) ((void *)(uintptr_t)(0x1000 + (number)))
#define API __attribute__((visibility("default")))
#define TRUST() do { if (MODE == ALWAYS_999) return 999; if (MODE == DRIVER_GONE) return 9; } while (0)

static int destroyed = 0;

API u32 nvmlInit_v2(void) { return 0; }

#if MODE != 1

API u32 nvmlShutdown(void) { return 0; }

static u32 text(char *buffer, u32 length, const char *value) {
    if (MODE != ENDLESS_TEXTS) { strncpy(buffer, value, length); return 0; }
    memset(buffer, 'x', length);
    if (!strncmp(value, "MIG-", 4)) memcpy(buffer, value, 4);
    return 0;
}

/* The wrapper reads this one itself and trusts its NUL. */
API u32 nvmlSystemGetDriverVersion(char *buffer, u32 length) {
    TRUST();
    strncpy(buffer, "580.95.05", length);
    return 0;
}
API u32 nvmlSystemGetCudaDriverVersion_v2(int *version) {
    TRUST();
    *version = MODE == ODD_NUMBERS ? -1 : 13000;
    return 0;
}
API u32 nvmlDeviceGetCount_v2(u32 *count) {
    TRUST();
    *count = MODE == MANY_GPUS ? 4000000000u : MODE == ONE_BAD_GPU ? 3 : 1;
    return 0;
}
API u32 nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    TRUST();
    *device = HANDLE(index);
    return 0;
}
API u32 nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    TRUST();
    *device = HANDLE(strcmp(id, "0000:65:00.0") ? 1 : 0);
    return 0;
}
API u32 nvmlDeviceGetPciInfo_v3(void *device, pci_info *info) {
    static const char *const ids[] = {"00000000:65:00.0", "00000000:66:00.0", "00000000:67:00.0"};
    TRUST();
    uintptr_t index = (uintptr_t)device - 0x1000;
    if (index > 2) return 2;
    if (MODE == ODD_ADDRESS) memset(info->bus_id, '7', sizeof info->bus_id);
    else strcpy(info->bus_id, ids[index]);
    return 0;
}
API u32 nvmlDeviceGetName(void *device, char *buffer, u32 length) {
    TRUST();
    return text(buffer, length, "Hostile");
}
API u32 nvmlDeviceGetUUID(void *device, char *buffer, u32 length) {
    TRUST();
    if (MODE == NO_UUID && device == HANDLE(500)) { buffer[0] = 0; return 0; }
    return text(buffer, length, device == HANDLE(500) ? "MIG-1" : "GPU-1");
}
API u32 nvmlDeviceGetMinorNumber(void *device, u32 *minor) {
    TRUST();
    *minor = MODE == ODD_NUMBERS ? 0xffffffffu : 0;
    return 0;
}
API u32 nvmlDeviceGetBrand(void *device, u32 *brand) { TRUST(); *brand = MODE == ODD_NUMBERS ? 0xffffffffu : 14; return 0; }
API u32 nvmlDeviceGetArchitecture(void *device, u32 *chip) { TRUST(); *chip = MODE == ODD_NUMBERS ? 4711 : 9; return 0; }
API u32 nvmlDeviceGetVirtualizationMode(void *device, u32 *mode) { TRUST(); *mode = MODE == ODD_NUMBERS ? 0xffffffffu : 0; return 0; }
API u32 nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    TRUST();
    *major = MODE == ODD_NUMBERS ? -7 : 9;
    *minor = 0;
    return 0;
}
API u32 nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *memory) {
    TRUST();
    if (MODE == ONE_BAD_GPU && device == HANDLE(1)) return 15;
    memory->total = MODE == ODD_NUMBERS ? ~0ull : 80ull << 30;
    return 0;
}
API u32 nvmlDeviceGetSerial(void *device, char *buffer, u32 length) { TRUST(); return text(buffer, length, "1322"); }
API u32 nvmlDeviceGetEccMode(void *device, u32 *current, u32 *pending) {
    TRUST();
    *current = *pending = MODE == ODD_NUMBERS ? 0xffffffffu : 1;
    return 0;
}
API u32 nvmlDeviceGetNvLinkState(void *device, u32 link, u32 *active) {
    TRUST();
    if (MODE != ODD_NUMBERS && link > 3) return 2;
    *active = MODE == ODD_NUMBERS ? 0xffffffffu : 1;
    return 0;
}
API u32 nvmlDeviceGetGpuFabricInfoV(void *device, fabric_v2 *info) {
    TRUST();
    if (info->version != (sizeof *info | 2 << 24)) return 25;
    memset(info->cluster, 0xff, sizeof *info - sizeof info->version);
    if (MODE == ODD_NUMBERS) return 0;
    info->status = 0;
    info->state = 3;
    return 0;
}
API u32 nvmlDeviceGetMigMode(void *device, u32 *current, u32 *pending) {
    TRUST();
    *current = *pending = MODE == ODD_MODE ? 77 : 1;
    return 0;
}
API u32 nvmlDeviceSetMigMode(void *device, u32 mode, u32 *status) { TRUST(); *status = 4242; return 0; }
API u32 nvmlDeviceGetGpuInstanceProfileInfoV(void *device, u32 profile, info_v3 *info) {
    TRUST();
    if (MODE != ODD_NUMBERS && profile > 0) return 2;
    if (MODE == ODD_NUMBERS) memset(&info->id, 0xff, sizeof *info - sizeof info->version);
    info->id = MODE == ODD_NUMBERS ? profile : 19;
    if (MODE == ODD_NUMBERS) return 0;
    info->slices = 1;
    info->max = 7;
    info->memory = 9984;
    text(info->name, sizeof info->name, "MIG 1g.10gb");
    return 0;
}
API u32 nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *device, u32 profile, placement *places, u32 *count) {
    TRUST();
    if (MODE == MANY_PLACEMENTS) { *count = 4000000000u; return 0; }
    if (!places) { *count = 1; return 7; }
    places[0].start = MODE == FAR_PLACEMENT ? 0xfffffffeu : 4;
    places[0].size = MODE == FAR_PLACEMENT ? 9 : 1;
    *count = MODE == OVERFULL_PLACEMENTS ? 90 : 1;
    return 0;
}
API u32 nvmlDeviceGetGpuInstances(void *device, u32 profile, void **instances, u32 *count) {
    TRUST();
    *count = MODE == MANY_INSTANCES ? 4000000000u : 1;
    instances[0] = MODE == NULL_INSTANCES ? 0 : HANDLE(100);
    return 0;
}
API u32 nvmlDeviceGetGpuInstanceById(void *device, u32 id, void **instance) {
    TRUST();
    *instance = MODE == NULL_INSTANCES ? 0 : HANDLE(100);
    return 0;
}
API u32 nvmlGpuInstanceGetInfo(void *instance, gi_info *info) {
    TRUST();
    if (MODE == LEFTOVER) return 29;
    info->id = 7 + destroyed;
    info->profile = 19;
    info->place.start = MODE == ELSEWHERE ? 3 : 4;
    info->place.size = 1;
    return 0;
}
API u32 nvmlDeviceCreateGpuInstanceWithPlacement(void *device, u32 profile, const placement *place, void **instance) {
    TRUST();
    *instance = MODE == NULL_INSTANCES ? 0 : HANDLE(100);
    return 0;
}
API u32 nvmlGpuInstanceDestroy(void *instance) {
    TRUST();
    if (MODE == LEFTOVER) return 30;
    destroyed++;
    return 0;
}
API u32 nvmlGpuInstanceGetComputeInstanceProfileInfo(void *instance, u32 profile, u32 engines, ci_profile *info) {
    TRUST();
    if (profile > 0) return 2;
    memset(info, MODE == ODD_NUMBERS ? 0xff : 0, sizeof *info);
    info->id = 0;
    info->slices = MODE == ODD_NUMBERS ? 0xffffffffu : 1;
    return 0;
}
API u32 nvmlGpuInstanceGetComputeInstances(void *instance, u32 profile, void **instances, u32 *count) {
    TRUST();
    *count = 1;
    instances[0] = HANDLE(200);
    return 0;
}
API u32 nvmlGpuInstanceGetComputeInstanceById(void *instance, u32 id, void **compute) { TRUST(); *compute = HANDLE(200); return 0; }
API u32 nvmlGpuInstanceCreateComputeInstance(void *instance, u32 profile, void **compute) { TRUST(); *compute = HANDLE(200); return 0; }
API u32 nvmlComputeInstanceGetInfo_v2(void *compute, ci_info *info) {
    TRUST();
    info->device = MODE == NULL_INSTANCES ? 0 : HANDLE(500);
    info->id = 0;
    return 0;
}
API u32 nvmlComputeInstanceDestroy(void *compute) { TRUST(); destroyed++; return 0; }
API u32 nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, process *list) {
    TRUST();
    if (MODE == MANY_PROCESSES) { *count = 4000000000u; return 7; }
    *count = 1;
    list[0].pid = 4711;
    return 0;
}
API u32 nvmlEventSetCreate(void **set) { TRUST(); *set = MODE == NULL_INSTANCES ? 0 : HANDLE(900); return 0; }
API u32 nvmlDeviceGetSupportedEventTypes(void *device, u64 *types) { TRUST(); *types = ~0ull; return 0; }
API u32 nvmlDeviceRegisterEvents(void *device, u64 types, void *set) { TRUST(); return types == 0x108 ? 0 : 2; }
API u32 nvmlEventSetWait_v2(void *set, event *data, u32 timeout) {
    TRUST();
    data->device = MODE == ODD_NUMBERS ? HANDLE(77) : 0;
    data->type = MODE == ODD_NUMBERS ? ~0ull : 8;
    data->data = MODE == ODD_NUMBERS ? ~0ull : 79;
    return 0;
}
API u32 nvmlEventSetFree(void *set) { TRUST(); return 0; }

#endif
