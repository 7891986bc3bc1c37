//! The CUDA libraries that are opened at run time ([`CudaLibrary`]), with their file names. Also
//! the reasons for rejecting a library file.
use std::{fmt, path::PathBuf};

/// One of CUDA's libraries that this program opens at run time, such as cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaLibrary {
    /// The driver API, part of the NVIDIA driver.
    Driver,
    /// NVRTC, the run-time compiler.
    Nvrtc,
    /// cuBLASLt, which computes matmuls.
    CublasLt,
    /// cuDNN, used for attention. Optional.
    Cudnn,
    /// NCCL, which runs collectives between GPUs.
    Nccl,
}

impl CudaLibrary {
    /// Returns the file names under which the library is searched for, best first.
    pub(super) fn file_names(self) -> &'static [&'static str] {
        match self {
            CudaLibrary::Driver => &["libcuda.so.1"],
            CudaLibrary::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            CudaLibrary::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
            CudaLibrary::Cudnn => &["libcudnn.so.9"],
            CudaLibrary::Nccl => &["libnccl.so.2"],
        }
    }

    /// Returns the name of the library for messages, such as `cuBLASLt`.
    pub(super) fn title(self) -> &'static str {
        match self {
            CudaLibrary::Driver => "the NVIDIA driver",
            CudaLibrary::Nvrtc => "NVRTC",
            CudaLibrary::CublasLt => "cuBLASLt",
            CudaLibrary::Cudnn => "cuDNN",
            CudaLibrary::Nccl => "NCCL",
        }
    }

    /// Returns instructions for the user to install the library, which errors show as help.
    pub(super) fn install_help(self) -> &'static str {
        match self {
            CudaLibrary::Driver => {
                "check that `nvidia-smi` works on this machine, and that a container was started with GPUs"
            }
            CudaLibrary::Nvrtc => {
                "install a CUDA toolkit or `pip install nvidia-cuda-nvrtc`, or add its directory to LD_LIBRARY_PATH"
            }
            CudaLibrary::CublasLt => {
                "install a CUDA toolkit or `pip install nvidia-cublas`, or add its directory to LD_LIBRARY_PATH"
            }
            CudaLibrary::Cudnn => {
                "install cuDNN or `pip install nvidia-cudnn-cu13`, or add its directory to LD_LIBRARY_PATH"
            }
            CudaLibrary::Nccl => {
                "install NCCL or `pip install nvidia-nccl-cu13`, or add its directory to LD_LIBRARY_PATH"
            }
        }
    }
}

/// A file of a CUDA library that exists but cannot be used, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedLibrary {
    /// Path of the library file.
    pub path: PathBuf,
    /// Reason why the file cannot be used.
    pub reason: RejectReason,
}

/// Why a file of a CUDA library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// The dynamic loader could not load the file. The value is its message.
    Loader(String),
    /// The library requires a newer CUDA version than the driver implements.
    NewerThanDriver {
        /// The CUDA major version of the driver.
        driver_cuda_major: u32,
    },
}

impl fmt::Display for RejectedLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            RejectReason::Loader(message) => f.write_str(message), // it begins with the path
            RejectReason::NewerThanDriver { driver_cuda_major } => {
                write!(
                    f,
                    "{} needs a newer driver than this one, which implements CUDA {driver_cuda_major}",
                    self.path.display()
                )
            }
        }
    }
}
