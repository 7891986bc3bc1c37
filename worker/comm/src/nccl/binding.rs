//! Bindings of the NCCL functions that this crate calls. All of them exist since NCCL 2.18. Their
//! types are those of the crate `cudarc`.
use cudarc::nccl::sys::*;
use std::ffi::{c_char, c_int, c_void};

/// A status code that a function of NCCL returns.
pub(super) type Status = c_int;

/// Size in bytes of NCCL's unique id, with which the ranks of a group find each other.
pub const ID_BYTES: usize = size_of::<ncclUniqueId>();

/// NCCL's status code of a call that has succeeded (`ncclSuccess`).
pub(super) const SUCCESS: Status = ncclResult_t::ncclSuccess as Status;
/// NCCL's status code of a non-blocking call that has not completed.
pub(super) const IN_PROGRESS: Status = ncclResult_t::ncclInProgress as Status;

/// Returns the configuration of a new NCCL communicator with non-blocking calls and NCCL's defaults
/// for all other options.
///
/// The options are those of NCCL 2.18. Later versions only append fields, and `size` and `version`
/// state which fields exist. NCCL 2.26 reads the traffic class, which was padding, for any
/// `version`.
pub(super) fn create_non_blocking_config() -> ncclConfig_t {
    const UNDEFINED_OPTION: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 21_800,
        blocking: 0,
        cgaClusterSize: UNDEFINED_OPTION,
        minCTAs: UNDEFINED_OPTION,
        maxCTAs: UNDEFINED_OPTION,
        netName: std::ptr::null(),
        splitShare: UNDEFINED_OPTION,
        trafficClass: UNDEFINED_OPTION,
    }
}

device::dynamic_library! {
    /// The NCCL functions that this crate calls, looked up in the opened library `libnccl.so.2`.
    pub(super) struct NcclFunctions: cudarc::nccl::sys, ncclResult_t;
    fn ncclGetVersion(version: *mut c_int);
    fn ncclGetUniqueId(id: *mut ncclUniqueId);
    fn ncclGetErrorString(status: Status) -> *const c_char;
    fn ncclGetLastError(comm: ncclComm_t) -> *const c_char;
    fn ncclCommInitRankConfig(
        comm: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t,
    );
    fn ncclCommGetAsyncError(comm: ncclComm_t, status: *mut Status);
    fn ncclCommAbort(comm: ncclComm_t);
    fn ncclGroupStart();
    fn ncclGroupEnd();
    fn ncclAllGather(
        send: *const c_void, recv: *mut c_void, count: usize, data_type: ncclDataType_t, comm: ncclComm_t,
        stream: cudaStream_t,
    );
    fn ncclReduceScatter(
        send: *const c_void, recv: *mut c_void, count: usize, data_type: ncclDataType_t, operation: ncclRedOp_t,
        comm: ncclComm_t, stream: cudaStream_t,
    );
    fn ncclSend(
        send: *const c_void, count: usize, data_type: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t,
    );
    fn ncclRecv(
        recv: *mut c_void, count: usize, data_type: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t,
    );
}
