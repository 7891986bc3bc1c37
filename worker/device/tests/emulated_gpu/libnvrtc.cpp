// NVRTC for the emulated GPU. The library checks its arguments. The image of a program is the name
// of its source file. If NVIDIA's NVRTC is in the directory `nvrtc` next to this library, the image
// is the PTX that it generates. NVRTC_FAILS=1: every compilation fails with a log.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <unistd.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int
struct Program {
    std::string name, image, log;
    void* real = nullptr;
};

API nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return 0;
}

// Returns a function of NVIDIA's NVRTC, or null if NVRTC is not in the directory `nvrtc` next to
// this library.
static void* real_function(const char* name) {
    static void* library = [] {
        Dl_info here;
        dladdr((void*)nvrtcVersion, &here);
        std::string path(here.dli_fname), directory = path.substr(0, path.rfind('/')) + "/nvrtc/";
        if (access(directory.c_str(), F_OK)) return (void*)nullptr;
        dlopen((directory + "libnvrtc-builtins.so.13.0").c_str(), RTLD_NOW | RTLD_GLOBAL);
        void* library = dlopen((directory + "libnvrtc.so.13").c_str(), RTLD_NOW);
        if (!library) fprintf(stderr, "emulated NVRTC: %s\n", dlerror()), abort();
        return library;
    }();
    return library ? dlsym(library, name) : nullptr;
}
#define REAL(name) ((decltype(&name))real_function(#name))
extern "C" int nvrtcGetPTXSize(void*, size_t*), nvrtcGetPTX(void*, char*); // declared for the calls to NVIDIA's NVRTC

API nvrtcGetNumSupportedArchs(int* n) {
    *n = 4;
    return 0;
}
API nvrtcGetSupportedArchs(int* archs) {
    archs[0] = 80, archs[1] = 89, archs[2] = 90, archs[3] = 100;
    return 0;
}
API nvrtcCreateProgram(void** program, const char* source, const char* name, int headers, const char* const* texts, const char* const* names) {
    if (!strstr(source, "KERNEL")) return 3;
    Program* p = new Program;
    p->name = name;
    p->name = p->name.substr(0, p->name.find('.'));
    *program = p;
    auto real = REAL(nvrtcCreateProgram);
    return real ? real(&p->real, source, name, headers, texts, names) : 0;
}
API nvrtcGetProgramLogSize(void* program, size_t* size) {
    *size = ((Program*)program)->log.size() + 1;
    return 0;
}
API nvrtcGetProgramLog(void* program, char* to) {
    strcpy(to, ((Program*)program)->log.c_str());
    return 0;
}

// Compiles a program. NVIDIA's NVRTC is asked for PTX instead of a binary: `sm_90` becomes
// `compute_90`.
API nvrtcCompileProgram(void* program, int n, const char* const* options) {
    Program* p = (Program*)program;
    bool arch = false;
    std::string virtual_arch;
    std::vector<const char*> adapted(options, options + n);
    for (auto& option : adapted) {
        if (strncmp(option, "--gpu-architecture=sm_", 22)) continue;
        bool is_emulated = !strcmp(option, "--gpu-architecture=sm_89") || getenv("EMULATED_GPU_TIMELINE");
        arch |= p->real || is_emulated;
        virtual_arch = std::string("--gpu-architecture=compute_") + (option + 22);
        option = virtual_arch.c_str();
    }
    if (!arch || getenv("NVRTC_FAILS")) {
        p->log = arch ? "elementwise.cu(1): error: identifier \"nonsense\" is undefined\n" : "nvrtc: error: invalid value for --gpu-architecture\n";
        return 6;
    }
    p->image = "EMULATED " + p->name;
    if (!p->real) return 0;
    int code = REAL(nvrtcCompileProgram)(p->real, n, adapted.data());
    size_t bytes = 0;
    if (code) {
        REAL(nvrtcGetProgramLogSize)(p->real, &bytes);
        p->log.resize(bytes);
        REAL(nvrtcGetProgramLog)(p->real, p->log.data());
        return code;
    }
    REAL(nvrtcGetPTXSize)(p->real, &bytes);
    p->image.resize(bytes);
    return REAL(nvrtcGetPTX)(p->real, p->image.data());
}
API nvrtcGetCUBINSize(void* program, size_t* size) {
    *size = ((Program*)program)->image.size() + 1;
    return 0;
}
API nvrtcGetCUBIN(void* program, char* to) {
    strcpy(to, ((Program*)program)->image.c_str());
    return 0;
}
API nvrtcDestroyProgram(void** program) {
    Program* p = (Program*)*program;
    if (p->real) REAL(nvrtcDestroyProgram)(&p->real);
    delete p;
    *program = nullptr;
    return 0;
}
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int code) {
    return code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}
