//! The functions of the CUDA driver for CUDA graphs ([`DriverGraphsApi`]). A driver may lack them.
use super::super::error::CudaError;
use super::super::library::CudaLibrary;
use super::super::library_search::{LibrarySearchPaths, OpenLibrary};
use super::cuda_library::{Status, cuda_library};
use super::driver::describe_status;
use cudarc::driver::sys::*;
use std::{
    ffi::{c_char, c_void},
    mem::MaybeUninit,
    path::PathBuf,
    ptr,
};

cuda_library! {
    /// The functions of the CUDA driver API for CUDA graphs, from `libcuda.so.1`.
    DriverGraphsApi: cudarc::driver::sys, CUresult, Driver, "CUDA 12";
    fn cuGetErrorName(status: Status, name: *mut *const c_char);
    fn cuGetErrorString(status: Status, text: *mut *const c_char);
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: u64);
    fn cuGraphExecKernelNodeSetParams_v2(
        executable: CUgraphExec, node: CUgraphNode, parameters: *const CUDA_KERNEL_NODE_PARAMS,
    );
    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream);
    fn cuGraphExecDestroy(executable: CUgraphExec);
    fn cuGraphDestroy(graph: CUgraph);
}

impl DriverGraphsApi {
    /// Returns the CUDA driver's name and description of the status code `status`.
    fn describe_status(&self, status: Status) -> String {
        describe_status(self.cuGetErrorName, self.cuGetErrorString, status)
    }
}

/// Type of the driver's function `cuStreamGetCaptureInfo_v2`, which exists since CUDA 11.3.
type CaptureInfoV2Fn = unsafe extern "C" fn(
    CUstream,
    *mut CUstreamCaptureStatus,
    *mut cuuint64_t,
    *mut CUgraph,
    *mut *const CUgraphNode,
    *mut usize,
) -> Status;

/// Type of the driver's function `cuStreamGetCaptureInfo_v3`, which exists since CUDA 12.3. The
/// function also returns the data of the edges.
type CaptureInfoV3Fn = unsafe extern "C" fn(
    CUstream,
    *mut CUstreamCaptureStatus,
    *mut cuuint64_t,
    *mut CUgraph,
    *mut *const CUgraphNode,
    *mut *const c_void,
    *mut usize,
) -> Status;

/// The driver's function `cuStreamGetCaptureInfo`, which reports the state of a graph capture, in
/// the newest version that the installed driver has.
pub(in crate::cuda) enum CaptureInfoFn {
    V2(CaptureInfoV2Fn),
    V3(CaptureInfoV3Fn),
}

impl CaptureInfoFn {
    /// Looks up the driver's function that reports the state of a graph capture
    /// (`cuStreamGetCaptureInfo`). Returns `None` if the driver has no known version of it.
    pub(in crate::cuda) fn look_up(paths: &LibrarySearchPaths) -> Option<CaptureInfoFn> {
        let library = std::mem::ManuallyDrop::new(paths.open_library(CudaLibrary::Driver).ok()?.library);
        // SAFETY: cuda.h declares the functions with these types.
        unsafe {
            let v3 =
                library.get::<CaptureInfoV3Fn>(b"cuStreamGetCaptureInfo_v3\0").map(|f| CaptureInfoFn::V3(*f));
            let v2 = || {
                library.get::<CaptureInfoV2Fn>(b"cuStreamGetCaptureInfo_v2\0").map(|f| CaptureInfoFn::V2(*f))
            };
            v3.or_else(|_| v2()).ok()
        }
    }

    /// Returns the node of the graph under capture on which the next call on `stream` will depend,
    /// or null if there is no single such node.
    pub(in crate::cuda) fn query_last_node(&self, stream: CUstream) -> CUgraphNode {
        let (mut status, mut id, mut graph) = (MaybeUninit::uninit(), 0, ptr::null_mut());
        let (mut nodes, mut edges, mut count) = (ptr::null(), ptr::null(), 0);
        // SAFETY: the outputs are written or keep their values. The nodes are valid until the next
        // call for the stream.
        unsafe {
            let result = match self {
                CaptureInfoFn::V2(f) => {
                    f(stream, status.as_mut_ptr(), &mut id, &mut graph, &mut nodes, &mut count)
                }
                CaptureInfoFn::V3(f) => {
                    f(stream, status.as_mut_ptr(), &mut id, &mut graph, &mut nodes, &mut edges, &mut count)
                }
            };
            if result == 0 && count == 1 && !nodes.is_null() { *nodes } else { ptr::null_mut() }
        }
    }
}
