//! [`PartFilter`]: which parts of the GPU check the options of `launch gpu-check` leave out.

/// Which parts of the GPU check are skipped or shortened, as the options `--quick`, `--tiny` and
/// `--ops` of `launch gpu-check` select.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartFilter {
    /// Whether only a few shapes are compared, and nothing is timed or trained.
    pub quick: bool,
    /// Whether the models are very small. With `quick`, training is then included.
    pub tiny: bool,
    /// Whether training is left out.
    pub ops_only: bool,
}
