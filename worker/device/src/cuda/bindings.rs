//! Declares the functions of CUDA's libraries that this program calls; each is looked up by name
//! when its library is opened at run time.
//!
//! Types, constants and signatures are those of the crate `cudarc`, which generates them from the
//! headers. The headers are those of the oldest supported versions: CUDA 12.0 and cuDNN 9.10.
mod cublas_lt;
mod cuda_library;
mod cudnn;
mod driver;
mod driver_graphs;
mod nvrtc;

pub(super) use cublas_lt::CublasLtApi;
pub(super) use cuda_library::Status;
pub(super) use cudarc::{
    cublaslt::sys as cublas_lt_sys, cudnn::sys as cudnn_sys, driver::sys as driver_sys,
    nvrtc::sys::nvrtcProgram,
};
pub(super) use cudnn::CudnnApi;
pub(super) use driver::{Address, DriverApi};
pub(super) use driver_graphs::{CaptureInfoFn, DriverGraphsApi};
pub(super) use nvrtc::NvrtcApi;
