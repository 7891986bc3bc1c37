// What NVIDIA's libraries want to see loaded where there is no card: a driver that has none, and cuBLASLt's version. Plans can be made
// and loaded; whatever would need a card says that there is none.
#ifdef DRIVER
enum { SUCCESS = 0, NO_DEVICE = 100 };
#define NONE(function) \
    int function(void) { return NO_DEVICE; }
#define DONE(function) \
    int function(void) { return SUCCESS; }
NONE(cuInit)
NONE(cuDriverGetVersion)
NONE(cuCtxGetCurrent)
NONE(cuCtxGetLimit)
NONE(cuCtxPopCurrent)
NONE(cuCtxPushCurrent)
NONE(cuDeviceGet)
NONE(cuDeviceGetCount)
NONE(cuGetErrorName)
NONE(cuGetErrorString)
NONE(cuKernelGetAttribute)
NONE(cuLaunchCooperativeKernel)
NONE(cuLaunchKernel)
NONE(cuLaunchKernelEx)
NONE(cuLibraryLoadFromFile)
NONE(cuLinkAddData)
NONE(cuLinkComplete)
NONE(cuLinkCreate)
NONE(cuLinkDestroy)
NONE(cuOccupancyMaxPotentialClusterSize)
NONE(cuStreamGetCtx)
DONE(cuKernelSetAttribute)
DONE(cuLibraryUnload)
static char some; // a library or a kernel: nobody looks into it
int cuLibraryLoadData(void** library) {
    *library = &some;
    return SUCCESS;
}
int cuLibraryGetKernel(void** kernel) {
    *kernel = &some;
    return SUCCESS;
}
#else
unsigned long cublasLtGetVersion(void) { return 130100; }
#endif
