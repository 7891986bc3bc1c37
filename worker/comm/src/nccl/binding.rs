//! The NCCL functions that this crate calls, declared as in nccl.h since version 2.18. Status codes
//! are numbers, because a newer library may return codes that this crate does not know.
use std::ffi::{c_char, c_int, c_uint, c_void};

/// An opaque pointer of NCCL or CUDA: an `ncclComm_t` or a `cudaStream_t`.
pub(super) type OpaqueHandle = *mut c_void;

/// Size in bytes of NCCL's unique id, with which the ranks of a group find each other.
pub const ID_BYTES: usize = 128;

/// The status code `ncclSuccess`.
pub(super) const SUCCESS: c_int = 0;
/// The status code `ncclInProgress` of a non-blocking call that has not completed.
pub(super) const IN_PROGRESS: c_int = 7;

/// `ncclUniqueId`: identifies a group; C functions take it by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; ID_BYTES]);

/// Element types of NCCL's buffers, with their numbers in `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum DataType {
    /// Unsigned bytes.
    U8 = 1,
    /// IEEE half precision.
    F16 = 6,
    /// IEEE single precision.
    F32 = 7,
    /// bfloat16.
    Bf16 = 9,
}

/// Reduction operators, with their numbers in `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum ReduceOp {
    /// The sum.
    Sum = 0,
    /// The sum divided by the number of ranks.
    Avg = 4,
}

/// `ncclConfig_t` of NCCL 2.18: the options of a new communicator. Later versions only append
/// fields, and `size` and `version` state which fields exist.
///
/// The last four bytes are padding in 2.18. Since 2.26 they are a number that NCCL reads for any
/// `version`, so they are set, too.
#[repr(C)]
pub(super) struct CommConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

impl CommConfig {
    /// Returns NCCL's default options, except that no call of the communicator blocks.
    pub(super) fn new_non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        CommConfig {
            size: size_of::<CommConfig>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

/// The error of a library that lacks a function.
pub(super) struct MissingFunction {
    pub(super) name: &'static str,
}

macro_rules! api {
    ($(fn $function:ident($($type:ty),* $(,)?) -> $result:ty;)*) => {
        /// The functions of an opened NCCL library, `libnccl.so.2`.
        #[allow(non_snake_case)]
        pub(super) struct NcclFunctions {
            $(pub(super) $function: unsafe extern "C" fn($($type),*) -> $result,)*
            /// Keeps the library open as long as its functions can be called.
            _library: libloading::Library,
        }

        impl NcclFunctions {
            /// Looks up every function in `library`. Fails with the name of the first one that is
            /// missing.
            pub(super) fn load(library: libloading::Library) -> Result<Self, MissingFunction> {
                Ok(NcclFunctions {
                    $($function: {
                        let name = concat!(stringify!($function), "\0").as_bytes();
                        // SAFETY: nccl.h declares the function with this type.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> $result>(name) };
                        *symbol.map_err(|_| MissingFunction { name: stringify!($function) })?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

api! {
    fn ncclGetVersion(*mut c_int) -> c_int;
    fn ncclGetUniqueId(*mut UniqueId) -> c_int;
    fn ncclGetErrorString(c_int) -> *const c_char;
    fn ncclGetLastError(OpaqueHandle) -> *const c_char;
    fn ncclCommInitRankConfig(*mut OpaqueHandle, c_int, UniqueId, c_int, *mut CommConfig) -> c_int;
    fn ncclCommGetAsyncError(OpaqueHandle, *mut c_int) -> c_int;
    fn ncclCommAbort(OpaqueHandle) -> c_int;
    fn ncclGroupStart() -> c_int;
    fn ncclGroupEnd() -> c_int;
    fn ncclAllGather(*const c_void, *mut c_void, usize, c_int, OpaqueHandle, OpaqueHandle) -> c_int;
    fn ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, OpaqueHandle, OpaqueHandle) -> c_int;
    fn ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, OpaqueHandle, OpaqueHandle) -> c_int;
    fn ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, OpaqueHandle, OpaqueHandle) -> c_int;
    fn ncclSend(*const c_void, usize, c_int, c_int, OpaqueHandle, OpaqueHandle) -> c_int;
    fn ncclRecv(*mut c_void, usize, c_int, c_int, OpaqueHandle, OpaqueHandle) -> c_int;
}
