//! [`LinearLayout`]: where the weight matrices of a matmul are, in the flat vector with the
//! parameters of a layer.
use super::{block_arguments::LayerInput, linear_precision::MatmulSizes};
use std::ops::Range;

/// Where the weight matrices of one matmul of a layer, such as those of q, k and v, are in the flat
/// vector with the layer's parameters. They have a common input, and their outputs are adjacent
/// columns.
#[derive(Debug)]
pub(super) struct LinearLayout {
    /// The range of the matrices in the flat vector of the layer's parameter unit.
    pub(super) weight: Range<usize>,
    /// The range of the biases in the flat vector of the layer's parameter unit.
    pub(super) bias: Option<Range<usize>>,
    /// The width of the input.
    pub(super) inputs: usize,
    /// The name of each matrix within the layer, and the width of its output.
    pub(super) modules: Vec<(&'static str, usize)>,
    /// The index of this matmul among the matmuls of the layer.
    pub(super) index: usize,
}

impl LinearLayout {
    /// Returns the total output width of all matrices that this matmul combines.
    pub(super) fn output_width(&self) -> usize {
        self.modules.iter().map(|(_, outputs)| outputs).sum()
    }

    /// Returns the sizes of this matmul for one micro-batch: the number of tokens, the inputs per
    /// token, and the outputs per token.
    pub(super) fn to_matmul_sizes(&self, input: &LayerInput) -> MatmulSizes {
        (input.batch.row_count(), self.inputs, self.output_width())
    }
}

/// Those matmuls of one layer whose weight matrices can have LoRA adapters: qkv, o, gate_up and
/// down.
pub(super) struct AdaptableLayerMatmuls {
    /// The prefix of the matrices' names, with a trailing dot.
    pub(super) prefix: String,
    /// The number of elements of the layer's unit without adapters.
    pub(super) unit_len: usize,
    /// The matmuls by [`LinearLayout::index`].
    pub(super) linears: [LinearLayout; 4],
}

impl AdaptableLayerMatmuls {
    /// Returns the full names of all matrices of the layer that can have LoRA adapters.
    pub(super) fn matrix_names(&self) -> impl Iterator<Item = String> {
        let modules = self.linears.iter().flat_map(|linear| &linear.modules);
        modules.map(|(name, _)| format!("{}{name}", self.prefix))
    }
}
