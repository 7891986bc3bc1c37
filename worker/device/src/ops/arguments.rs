//! [`WriteMode`], and functions that check the lengths of an op's arguments.

/// Whether an op overwrites its output (`=`) or adds its result to it (`+=`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// The result replaces the output. The previous content of the output is not read.
    Overwrite,
    /// The result is added elementwise to the previous content of the output.
    Accumulate,
}

/// Panics unless each of `arguments` (name, length, required length) has the required length. `op`
/// is the op's name in the panic.
#[track_caller]
pub(crate) fn expect_lens<const N: usize>(op: &str, arguments: [(&str, usize, usize); N]) {
    for (name, len, expected) in arguments {
        expect_len(op, name, len, expected);
    }
}

/// Panics unless the argument `name` of the op `op` has the length `expected`.
#[track_caller]
pub(crate) fn expect_len(op: &str, name: &str, len: usize, expected: usize) {
    assert!(len == expected, "{op}: {name} has {len} elements, but the shape needs {expected}");
}
