//! Declares the functions of a C library that is opened at run time
//! ([`dynamic_library!`](macro@crate::dynamic_library)). The compiler compares their signatures
//! with the signatures in the crate `cudarc`.

/// Error that an opened C library lacks the function with this name, because the library is too
/// old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingFunction(pub &'static str);

/// Defines a struct of function pointers to a C library, and the struct's constructor `resolve`,
/// which looks the functions up by name in an opened library.
///
/// After the struct's name follow cudarc's module of the library and the type of the library's
/// status codes in that module. A function without a result type returns a status code. The
/// invoking module must define the type `Status` as an integer. A newer library may return codes
/// that cudarc's enum lacks, and such a value of the enum would be undefined behaviour.
#[macro_export]
macro_rules! dynamic_library {
    (@result) => { Status };
    (@result $result:ty) => { $result };
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $library:ident: $($sys:ident)::+, $status:ident;
        $(fn $function:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*
    ) => {
        $(#[$attribute])*
        #[allow(non_snake_case, reason = "the names of the library's functions")]
        $visibility struct $library {
            $($visibility $function:
                unsafe extern "C" fn($($type),*) -> $crate::dynamic_library!(@result $($result)?),)*
        }

        // Fails to compile if a signature differs from cudarc's.
        const _: () = {
            use $($sys)::+ as sys;
            type Status = sys::$status;
            $(let _: unsafe fn($($type),*) -> $crate::dynamic_library!(@result $($result)?) = sys::$function;)*
        };

        impl $library {
            /// Looks up every declared function in the opened library. Fails with the first
            /// function that is missing. The library stays open until the process ends.
            $visibility fn resolve(
                library: libloading::Library,
            ) -> std::result::Result<Self, $crate::dynamic_library::MissingFunction> {
                // Never unloaded: NVIDIA's libraries keep threads and handlers whose code must not
                // vanish.
                let library = ::std::mem::ManuallyDrop::new(library);
                Ok($library {
                    $($function: {
                        let name = concat!(stringify!($function), "\0").as_bytes();
                        // SAFETY: cudarc, which is generated from the library's header, declares
                        // the function with this type.
                        *unsafe { library.get(name) }.map_err(|_| {
                            $crate::dynamic_library::MissingFunction(stringify!($function))
                        })?
                    },)*
                })
            }
        }
    };
}
