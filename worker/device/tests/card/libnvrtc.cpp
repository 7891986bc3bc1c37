// A run-time compiler for the emulated card: it checks what it is asked, and its image names the file.
// NVRTC_FAILS=1: every compilation fails with a log.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#define API extern "C" __attribute__((visibility("default"))) int
struct Program {
    std::string name, image, log;
};

API nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
API nvrtcGetNumSupportedArchs(int* n) {
    *n = 3;
    return 0;
}
API nvrtcGetSupportedArchs(int* archs) {
    archs[0] = 80, archs[1] = 90, archs[2] = 100;
    return 0;
}
API nvrtcCreateProgram(void** program, const char* source, const char* name, int, const char* const*, const char* const*) {
    if (!strstr(source, "KERNEL")) return 3;
    Program* p = new Program;
    p->name = name;
    p->name = p->name.substr(0, p->name.find('.'));
    *program = p;
    return 0;
}
API nvrtcCompileProgram(void* program, int n, const char* const* options) {
    Program* p = (Program*)program;
    bool arch = false;
    for (int i = 0; i < n; i++) arch |= !strcmp(options[i], "--gpu-architecture=sm_90");
    if (!arch || getenv("NVRTC_FAILS")) {
        p->log = arch ? "flat.cu(1): error: identifier \"nonsense\" is undefined\n" : "nvrtc: error: invalid value for --gpu-architecture\n";
        return 6;
    }
    p->image = "EMULATED " + p->name;
    return 0;
}
API nvrtcGetCUBINSize(void* program, size_t* size) {
    *size = ((Program*)program)->image.size() + 1;
    return 0;
}
API nvrtcGetCUBIN(void* program, char* to) {
    strcpy(to, ((Program*)program)->image.c_str());
    return 0;
}
API nvrtcGetProgramLogSize(void* program, size_t* size) {
    *size = ((Program*)program)->log.size() + 1;
    return 0;
}
API nvrtcGetProgramLog(void* program, char* to) {
    strcpy(to, ((Program*)program)->log.c_str());
    return 0;
}
API nvrtcDestroyProgram(void** program) {
    delete (Program*)*program;
    *program = nullptr;
    return 0;
}
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int code) {
    return code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}
