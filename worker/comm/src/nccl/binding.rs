//! The functions of NCCL that are used, as nccl.h declares them since 2.18. Codes stay numbers: a newer library may return ones
//! that no list here knows.
use super::ID_BYTES;
use std::ffi::{c_char, c_int, c_uint, c_void};

pub(super) type Handle = *mut c_void;

/// ncclSuccess, ncclInProgress
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// ncclUniqueId, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; ID_BYTES]);

/// ncclDataType_t
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum DataType {
    U8 = 1,
    F16 = 6,
    F32 = 7,
    Bf16 = 9,
}

/// ncclRedOp_t
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Sum {
    Plain = 0,
    /// Divided by the number of ranks.
    Mean = 4,
}

/// ncclConfig_t as of 2.18. Later versions only append; size and version say where this one ends. Its last four bytes are padding
/// in 2.18 and a number since 2.26, which reads them whatever the version says: they are set, too.
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
    /// Everything as the library likes it, but no call waits.
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

macro_rules! api {
    ($(fn $function:ident($($type:ty),* $(,)?) -> $result:ty;)*) => {
        /// `libnccl.so.2`
        #[allow(non_snake_case)]
        pub(super) struct Api {
            $(pub(super) $function: unsafe extern "C" fn($($type),*) -> $result,)*
            /// Open as long as its functions can be called.
            _library: libloading::Library,
        }

        impl Api {
            /// Every function, or the name of the first that this library lacks.
            pub(super) fn of(library: libloading::Library) -> Result<Self, &'static str> {
                Ok(Api {
                    $($function: {
                        let name = concat!(stringify!($function), "\0").as_bytes();
                        // SAFETY: the header declares the function so.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> $result>(name) };
                        *symbol.map_err(|_| stringify!($function))?
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
