//! Declarations of the NCCL functions that this crate calls, as in nccl.h since 2.18. Status codes
//! are numbers, because a newer library may return codes that this crate does not know.
use super::ID_BYTES;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// An `ncclComm_t` or a `cudaStream_t`.
pub(super) type Handle = *mut c_void;

/// The status codes `ncclSuccess` and `ncclInProgress`.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// `ncclUniqueId`: the id of a group, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; ID_BYTES]);

/// Element types, with their numbers in `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum DataType {
    /// Bytes.
    U8 = 1,
    /// IEEE half precision.
    F16 = 6,
    /// IEEE single precision.
    F32 = 7,
    /// bfloat16.
    Bf16 = 9,
}

/// Reductions, with their numbers in `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum ReduceOp {
    /// The sum.
    Sum = 0,
    /// The sum divided by the number of ranks.
    Avg = 4,
}

/// `ncclConfig_t` of NCCL 2.18. Later versions only append fields; `size` and `version` state which
/// fields exist. The last four bytes are padding in 2.18 and a number since 2.26, which reads them
/// for any `version`. So they are set, too.
#[repr(C)]
pub(super) struct Config {
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

impl Config {
    /// The library's defaults, except that no call blocks.
    pub(super) fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
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

/// The first function that a library lacks.
pub(super) struct MissingFunction {
    pub(super) name: &'static str,
}

macro_rules! api {
    ($(fn $function:ident($($type:ty),* $(,)?) -> $result:ty;)*) => {
        /// The functions of an opened `libnccl.so.2`.
        #[allow(non_snake_case)]
        pub(super) struct Api {
            $(pub(super) $function: unsafe extern "C" fn($($type),*) -> $result,)*
            /// Keeps the library open while its functions can be called.
            _library: libloading::Library,
        }

        impl Api {
            /// Finds every function. Fails with the name of the first one that the library lacks.
            pub(super) fn load(library: libloading::Library) -> Result<Self, MissingFunction> {
                Ok(Api {
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
    fn ncclGetLastError(Handle) -> *const c_char;
    fn ncclCommInitRankConfig(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int;
    fn ncclCommGetAsyncError(Handle, *mut c_int) -> c_int;
    fn ncclCommAbort(Handle) -> c_int;
    fn ncclGroupStart() -> c_int;
    fn ncclGroupEnd() -> c_int;
    fn ncclAllGather(*const c_void, *mut c_void, usize, c_int, Handle, Handle) -> c_int;
    fn ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
    fn ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
    fn ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
    fn ncclSend(*const c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
    fn ncclRecv(*mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
}
