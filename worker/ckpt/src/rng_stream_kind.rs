//! [`RngStreamKind`]: the random generators whose states training programs save: Python's, NumPy's,
//! and torch's on CPUs and GPUs.
use serde::Serialize;
use std::fmt;

/// A random generator whose state training programs save for each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RngStreamKind {
    /// The module `random` of Python.
    Python,
    /// The global generator of NumPy, `numpy.random`.
    Numpy,
    /// torch's default generator on the CPU.
    TorchCpu,
    /// torch's default generators on all GPUs that a rank sees.
    TorchCuda,
}

impl RngStreamKind {
    /// All random generators, in the order in which files store their states.
    pub const ALL: [RngStreamKind; 4] =
        [RngStreamKind::Python, RngStreamKind::Numpy, RngStreamKind::TorchCpu, RngStreamKind::TorchCuda];

    /// Returns the name of the random generator that tables show to the user. The name is also
    /// hashed into the seed of a new stream, so it must never change.
    pub fn name(self) -> &'static str {
        match self {
            RngStreamKind::Python => "python",
            RngStreamKind::Numpy => "numpy",
            RngStreamKind::TorchCpu => "torch_cpu",
            RngStreamKind::TorchCuda => "torch_cuda",
        }
    }
}

impl fmt::Display for RngStreamKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
