//! [`WriteMode`], and checks of the lengths of arguments.

/// Whether an op overwrites its output (`=`) or adds to its output (`+=`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// The result replaces the output. The previous content of the output is not read.
    Overwrite,
    /// The result is added elementwise to the previous content of the output.
    Accumulate,
}

/// Panics unless each argument of the op `op` has the length that the shape requires. An argument
/// is given by its name, its length and the required length.
#[track_caller]
pub(crate) fn expect_lens<const N: usize>(op: &str, arguments: [(&str, usize, usize); N]) {
    for (name, len, expected) in arguments {
        expect_len(op, name, len, expected);
    }
}

/// Panics unless the argument `name` of the op `op` has the length that the shape requires.
#[track_caller]
pub(crate) fn expect_len(op: &str, name: &str, len: usize, expected: usize) {
    assert!(len == expected, "{op}: {name} has {len} elements, but the shape needs {expected}");
}
