// Stubs of the libraries that NVIDIA's cuDNN loads, for a machine without a GPU: a driver that
// reports no GPU, and cuBLASLt's version. With them cuDNN can make and load plans. Every other call
// fails with NO_DEVICE.
#ifdef DRIVER
enum { SUCCESS = 0, NO_DEVICE = 100 };
#define FAILS(function) \
    int function(void) { return NO_DEVICE; }
#define SUCCEEDS(function) \
    int function(void) { return SUCCESS; }
FAILS(cuInit)
FAILS(cuDriverGetVersion)
FAILS(cuCtxGetCurrent)
FAILS(cuCtxGetLimit)
FAILS(cuCtxPopCurrent)
FAILS(cuCtxPushCurrent)
FAILS(cuDeviceGet)
FAILS(cuDeviceGetCount)
FAILS(cuGetErrorName)
FAILS(cuGetErrorString)
FAILS(cuKernelGetAttribute)
FAILS(cuLaunchCooperativeKernel)
FAILS(cuLaunchKernel)
FAILS(cuLaunchKernelEx)
FAILS(cuLibraryLoadFromFile)
FAILS(cuLinkAddData)
FAILS(cuLinkComplete)
FAILS(cuLinkCreate)
FAILS(cuLinkDestroy)
FAILS(cuOccupancyMaxPotentialClusterSize)
FAILS(cuStreamGetCtx)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuLibraryUnload)
static char handle; // stands for every library and kernel; its content is never read
int cuLibraryLoadData(void** library) {
    *library = &handle;
    return SUCCESS;
}
int cuLibraryGetKernel(void** kernel) {
    *kernel = &handle;
    return SUCCESS;
}
#else
unsigned long cublasLtGetVersion(void) { return 130100; }
#endif
