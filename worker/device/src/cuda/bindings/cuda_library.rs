//! The macro [`cuda_library!`], which declares the functions of a CUDA library for use after
//! opening it at run time, and converts status codes to errors.
use std::ffi::{CStr, c_char, c_int};

/// A status code that a CUDA library returns; 0 is success.
pub(in crate::cuda) type Status = c_int;

/// Defines a struct that contains the functions of a CUDA library opened at run time, with methods
/// that convert the library's status codes to errors. Each function that returns a status code also
/// becomes a method that returns a `Result`.
///
/// The invoking module must define `describe_status`, which returns the library's own message for a
/// status code that is an error.
macro_rules! cuda_library {
    (@method fn $function:ident($($argument:ident: $type:ty),*) -> $result:ty) => {};
    (@method fn $function:ident($($argument:ident: $type:ty),*)) => {
        /// Calls the library's function of this name. Fails with the library's message.
        #[allow(dead_code, reason = "some functions are called without this method")]
        #[allow(non_snake_case, reason = "the name of the library's function")]
        pub(in crate::cuda) unsafe fn $function(&self, $($argument: $type),*) -> Result<(), CudaError> {
            // SAFETY: promised by the caller.
            let status = unsafe { (self.$function)($($argument),*) };
            self.check_status(stringify!($function), status)
        }
    };
    (
        $(#[$attribute:meta])*
        $library:ident: $($sys:ident)::+, $status:ident, $kind:ident, $required:literal;
        $(fn $function:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*
    ) => {
        $crate::dynamic_library! {
            $(#[$attribute])*
            pub(in crate::cuda) struct $library: $($sys)::+, $status;
            $(fn $function($($argument: $type),*) $(-> $result)?;)*
        }

        impl $library {
            /// Opens the CUDA library, looks up its functions, and returns them with the library's
            /// path.
            pub(in crate::cuda) fn open(paths: &LibrarySearchPaths) -> Result<(Self, PathBuf), CudaError> {
                let OpenLibrary { library, path } = paths.open_library(CudaLibrary::$kind)?;
                match Self::resolve(library) {
                    Ok(functions) => Ok((functions, path)),
                    Err(missing) => Err(CudaError::LibraryTooOld {
                        library: CudaLibrary::$kind,
                        path,
                        found: format!("a version without {}", missing.0),
                        required: concat!($required, " or newer").to_owned(),
                    }),
                }
            }

            /// Fails if `status`, which the library's function `function` returned, is an error.
            /// The error contains the library's own message, and the function's name without a
            /// version suffix.
            pub(in crate::cuda) fn check_status(&self, function: &str, status: Status) -> Result<(), CudaError> {
                if status == 0 {
                    return Ok(());
                }
                let function = function.trim_end_matches("_v2").to_owned();
                Err(CudaError::Call { function, status, message: self.describe_status(status) })
            }

            $(cuda_library!(@method fn $function($($argument: $type),*) $(-> $result)?);)*
        }
    };
}
pub(super) use cuda_library;

/// Copies a C string that a library returned to a Rust string. A null pointer becomes `unknown
/// error`.
///
/// # Safety
///
/// `text` must be null or a C string.
pub(super) unsafe fn copy_c_string(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
