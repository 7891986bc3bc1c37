//! Collectives on GPU memory through NCCL ([`NcclComm`]), and wrappers of NCCL's communicator
//! ([`RawNcclComm`]) and of its library, which is opened at run time ([`NcclLibrary`]).
//!
//! Every communicator is non-blocking. A call never waits inside the library. Every wait is a loop
//! in this module that polls the communicator for errors, aborts and the timeout. So a peer that
//! died or never joined is an error, not a hang. A watchdog polls while work runs on the GPU.
//!
//! Functions enqueue work on a CUDA stream and return; [`RawNcclComm::wait_until_done`] waits for
//! it. The caller passes device addresses and streams.
mod binding;
mod comm;
mod equal_parts;
mod library;
mod raw_comm;
mod watchdog;

pub use crate::nccl_error::{NcclError, Result};
pub use binding::ID_BYTES;
pub use comm::NcclComm;
pub use cudarc::nccl::sys::ncclDataType_t;
pub use equal_parts::EqualPartsPlan;
pub use library::NcclLibrary;
pub use raw_comm::{CudaStream, PeerBuffer, RawNcclComm};
