// The entry points of the HIP runtime and of hiprtc that kvkernels calls, run by the emulator, whose
// runtime.cpp is compiled into the same library. A "code object" is a shared library that
// $FAKEHIP_COMPILER makes: `$FAKEHIP_COMPILER source result`.
//
// FAKEHIP_ARCH: the card (default gfx1030); FAKEHIP_MEMORY: its bytes; FAKEHIP_FAIL: one of nodevice,
// launch (at once), async (found when waiting), compile, image. Memory starts as NaN, copies are
// checked for bounds and direction, frees for being frees of something.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>
extern "C" {
void kvk_order(int kind, unsigned seed, int lanes);
const char *kvk_launch(void (*entry)(void **), void **params, const int *grid, int threads, char *a, char *b);
}
#define API extern "C" __attribute__((visibility("default"))) int
enum { OK, INVALID, MEMORY, NO_DEVICE = 100, BAD_IMAGE = 200, NO_BINARY = 209, NOT_FOUND = 500, LAUNCH = 719 };
namespace {
struct Module { void *handle; };
struct Function { void (*entry)(void **); Module *module; };
struct Program { std::string source, log, code; };
std::map<char *, size_t> live;
size_t used = 0, launches = 0;
bool lost = false;

const char *env(const char *name, const char *otherwise) { const char *v = getenv(name); return v && *v ? v : otherwise; }
bool fails(const char *what) { return !strcmp(env("FAKEHIP_FAIL", ""), what); }
const char *arch() { return env("FAKEHIP_ARCH", "gfx1030"); }
bool wide() { return !strncmp(arch(), "gfx9", 4); }
size_t memory() { return strtoull(env("FAKEHIP_MEMORY", "1073741824"), nullptr, 10); }
bool inside(const void *p, size_t n) {
    auto it = live.upper_bound((char *)p);
    return it != live.begin() && (--it, (char *)p + n <= it->first + it->second);
}
std::string file(const char *end, int serial) {
    return std::string(env("TMPDIR", "/tmp")) + "/fakehip-" + std::to_string(getpid()) + "-" + std::to_string(serial) + end;
}
std::string content(const std::string &path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
int serial = 0;
}  // namespace

API hipGetDeviceCount(int *n) { *n = fails("nodevice") ? 0 : 1; return *n ? OK : NO_DEVICE; }
API hipSetDevice(int index) { return index == 0 ? OK : 101; }
API hipRuntimeGetVersion(int *v) { *v = 60342134; return OK; }
API hipDriverGetVersion(int *v) { return hipRuntimeGetVersion(v); }
API hipDeviceGetAttribute(int *v, int which, int) {
    const std::map<int, int> known = {{63, 60}, {56, 1024}, {74, 65536}, {87, wide() ? 64 : 32}};
    if (!known.count(which)) return INVALID;
    *v = known.at(which);
    return OK;
}
API hipDeviceGetName(char *text, int n, int) { snprintf(text, n, "Fake %s", arch()); return OK; }
API hipDeviceTotalMem(size_t *n, int) { *n = memory(); return OK; }
API hipGetDevicePropertiesR0600(char *p, int) {
    memset(p, 0, 1472);
    strcpy(p, "Fake");
    strcpy(p + 1160, arch());
    return OK;
}
extern "C" const char *hipGetErrorName(int e) { return e == NO_DEVICE ? "hipErrorNoDevice" : "hipErrorFake"; }
extern "C" const char *hipGetErrorString(int e) {
    return e == MEMORY ? "out of memory" : e == LAUNCH ? "unspecified launch failure" : e == NO_BINARY ? "no kernel image" : "fake error";
}

API hipMalloc(void **p, size_t n) {
    if (used + n > memory()) return MEMORY;
    char *m = (char *)aligned_alloc(256, (n + 255) / 256 * 256);
    memset(m, 0xff, n);
    live[m] = n, used += n, *p = m;
    return OK;
}
API hipFree(void *p) {
    auto it = live.find((char *)p);
    if (p && it == live.end()) return INVALID;
    if (p) used -= it->second, live.erase(it), free(p);
    return OK;
}
API hipMemGetInfo(size_t *free_, size_t *total) { *total = memory(), *free_ = *total - used; return OK; }
API hipMemcpy(void *d, const void *s, size_t n, int kind) {
    if (lost) return LAUNCH;
    if (kind < 1 || kind > 3) return 21;
    if (inside(d, n) != bool(kind & 1) || inside(s, n) != bool(kind & 2)) return INVALID;
    memcpy(d, s, n);
    return OK;
}
API hipMemsetAsync(void *p, int byte, size_t n, void *) { return inside(p, n) ? memset(p, byte, n), OK : INVALID; }
API hipPointerGetAttributes(int *out, void *p) {
    if (!inside(p, 1)) return INVALID;
    out[0] = 2, out[1] = atoi(env("FAKEHIP_CARD_OF_POINTERS", "0"));
    return OK;
}
API hipStreamSynchronize(void *) { return lost ? LAUNCH : OK; }
API hipDeviceSynchronize() { return lost ? LAUNCH : OK; }

API hipModuleLoadData(void **m, const void *code) {
    if (fails("image")) return NO_BINARY;
    uint64_t size;
    if (memcmp(code, "FAKECODE", 8)) return BAD_IMAGE;
    memcpy(&size, (const char *)code + 8, 8);
    const std::string path = file(".so", serial++);
    std::ofstream(path, std::ios::binary).write((const char *)code + 16, size);
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    unlink(path.c_str());
    if (!handle) return fprintf(stderr, "%s\n", dlerror()), BAD_IMAGE;
    *m = new Module{handle};
    return OK;
}
API hipModuleGetFunction(void **f, void *m, const char *name) {
    void *entry = dlsym(((Module *)m)->handle, ("kvk_entry_" + std::string(name)).c_str());
    if (!entry) return NOT_FOUND;
    *f = new Function{(void (*)(void **))entry, (Module *)m};
    return OK;
}
API hipModuleLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                          void *stream, void **params, void **extra) {
    if (!gx || !gy || !gz || bx > 1024 || by != 1 || bz != 1 || shared || stream || extra || !params) return INVALID;
    if (fails("launch")) return LAUNCH;
    lost = fails("async");
    char *a, *b;
    ((void (*)(char **, char **))dlsym(((Function *)f)->module->handle, "kvk_shared_range"))(&a, &b);
    const int grid[3] = {(int)gx, (int)gy, (int)gz};
    kvk_order(0, 0, wide() ? 64 : 32);
    const char *failure = kvk_launch(((Function *)f)->entry, params, grid, (int)bx, a, b);
    launches++;
    return failure ? fprintf(stderr, "%s\n", failure), LAUNCH : OK;
}
extern "C" size_t fakehip_live() { return live.size(); }
extern "C" void fakehip_recover() { lost = false; }
extern "C" size_t fakehip_launches() { return launches; }

extern "C" const char *hiprtcGetErrorString(int e) { return e == 6 ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR"; }
API hiprtcCreateProgram(void **p, const char *s, const char *, int headers, const char **, const char **) {
    if (headers) return 1;
    *p = new Program{s, "", ""};
    return OK;
}
API hiprtcCompileProgram(void *p, int n, const char **options) {
    Program &program = *(Program *)p;
    bool contract = true, known = false;
    for (int i = 0; i < n; i++) {
        contract &= strcmp(options[i], "-ffp-contract=off") != 0;
        known |= options[i] == "--offload-arch=" + std::string(arch(), strcspn(arch(), ":"));
    }
    if (!known) return program.log = "error: another --offload-arch than the card's", 6;
    if (contract || fails("compile")) return program.log = "kvk.hip:7: error: no such thing", 6;
    const std::string source = file(".hip", serial), result = file(".out", serial), log = file(".log", serial);
    serial++;
    std::ofstream(source) << program.source;
    const std::string command = std::string(env("FAKEHIP_COMPILER", "false")) + " " + source + " " + result + " 2> " + log;
    const bool failed = system(command.c_str()) != 0;
    if (failed) program.log = content(log);
    else program.code = content(result);
    for (auto &path : {source, result, log}) unlink(path.c_str());
    return failed ? 6 : OK;
}
API hiprtcGetProgramLogSize(void *p, size_t *n) { *n = ((Program *)p)->log.size() + 1; return OK; }
API hiprtcGetProgramLog(void *p, char *text) { strcpy(text, ((Program *)p)->log.c_str()); return OK; }
API hiprtcGetCodeSize(void *p, size_t *n) { *n = ((Program *)p)->code.size() + 16; return OK; }
API hiprtcGetCode(void *p, char *out) {
    const std::string &code = ((Program *)p)->code;
    const uint64_t size = code.size();
    memcpy(out, "FAKECODE", 8), memcpy(out + 8, &size, 8), memcpy(out + 16, code.data(), size);
    return OK;
}
API hiprtcDestroyProgram(void **p) { delete (Program *)*p; *p = nullptr; return OK; }
