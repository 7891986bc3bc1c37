//! The macro that declares the diagnostic codes of one area of the product, such as checkpoints.

/// Declares the diagnostic codes of one area of the product (such as SSH): a constant for each
/// code, and the list `ALL` of these codes.
macro_rules! codes {
    ($($constant:ident: $category:ident = $name:literal {
        summary: $summary:literal, cause: $cause:literal, remedy: $remedy:literal $(,)?
    })*) => {
        $(
            #[doc = $summary]
            pub const $constant: $crate::code::Code = $crate::code::Code::new(&$crate::code::CodeInfo {
                name: $name,
                category: $crate::code::Category::$category,
                summary: $summary,
                cause: $cause,
                remedy: $remedy,
            });
        )*
        /// All diagnostic codes that the module of one area declares, in the order of
        /// docs/errors.md.
        pub(crate) const ALL: &[$crate::code::Code] = &[$($constant),*];
    };
}
