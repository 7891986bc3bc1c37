//! Forward and backward pass of a [`Model`]'s blocks: embedding, layers and head.
use super::{
    decoder_buffers::{SavedBuffers, ScratchBuffers},
    model::Model,
    row_norm::RowNorm,
};
use crate::model::{
    activation_buffers::{ActivationBuffers, BufferSpec, list_buffer_specs},
    block_arguments::{HeadGrads, HeadInput, LayerBuffers, LayerInput},
    micro_batch::MicroBatch,
};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{ClassifierGrads, ClassifierShape, WriteMode},
};

impl Model {
    /// Declares the buffers in which a layer's forward pass saves values for its backward pass, for
    /// micro-batches of `b` sequences of `t` tokens.
    pub fn declare_saved_buffers(&self, b: usize, t: usize) -> Vec<BufferSpec> {
        list_buffer_specs(SavedBuffers::declare(&self.config, b, t))
    }

    /// Declares the buffers for temporary values that all blocks (embedding, layers and head)
    /// share, for micro-batches of `b` sequences of `t` tokens.
    pub fn declare_scratch_buffers(&self, b: usize, t: usize) -> Vec<BufferSpec> {
        let lora = self.linears.declare_scratch(b * t);
        list_buffer_specs(ScratchBuffers::declare(&self.config, b * t, lora))
    }

    /// Moves the model's constants, such as the tables of rotary embedding, to the device of `ops`,
    /// the compute backend.
    pub fn move_constants_to_device(&mut self, ops: &dyn Ops) {
        for tables in [&mut self.rope_tables, &mut self.sliding_rope_tables].into_iter().flatten() {
            tables.move_to_device(ops);
        }
    }

    /// Computes the embedding of each token of a micro-batch, and writes it to `x`, `[rows,
    /// hidden]`. `params` is the flat vector of the embedding unit.
    pub fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &MicroBatch, mut x: ViewMut) {
        let (b, t, d, len) =
            (batch.sequences, batch.seq_len, self.config.sizes.hidden, self.embedding_matrix_len());
        ops.embedding_forward(x.reborrow(), params.slice(0..len), &batch.tokens, d);
        if self.config.learned_positions.is_some() {
            // Every sequence is one row of t·d elements, to which the positions are added like a
            // bias.
            ops.bias_forward(x.reborrow(), params.slice(len..len + t * d), b, t * d);
        }
        if let Some(scale) = self.config.embedding_scale {
            ops.scale(x.reborrow(), scale);
        }
        self.embedding_dropout.apply_dropout(ops, batch, d, x);
    }

    /// Computes the gradients of the embedding's parameters for one micro-batch, and adds them to
    /// `grads`, the flat gradient vector of the embedding. `dx`, `[rows, hidden]`, is the gradient
    /// of the embedding's output. Leaves unspecified values in `dx`.
    pub fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &MicroBatch, mut dx: ViewMut) {
        let (b, t, d) = (batch.sequences, batch.seq_len, self.config.sizes.hidden);
        self.embedding_dropout.apply_dropout(ops, batch, d, dx.reborrow());
        if let Some(scale) = self.config.embedding_scale {
            ops.scale(dx.reborrow(), scale);
        }
        if let Some(padding) = self.config.padding_token {
            let mut end = 0;
            for run in batch.tokens.chunk_by(|a, b| (*a == padding) == (*b == padding)) {
                end += run.len();
                if run[0] == padding {
                    ops.fill_with_zeros(dx.slice_mut((end - run.len()) * d..end * d));
                }
            }
        }
        let (tokens, positions) = grads.split_at(self.embedding_matrix_len());
        ops.embedding_backward(tokens, dx.as_view(), &batch.tokens, d);
        if self.config.learned_positions.is_some() {
            ops.bias_backward(positions.slice(0..t * d), dx.as_view(), b, t * d);
        }
    }

    /// Computes the forward pass of one decoder layer whose MLP is dense (not a mixture of
    /// experts). Writes the output to `y`, `[rows, hidden]`, and values for the backward pass to
    /// `buffers`. If `y` is `None`, computes only the saved values (recomputation).
    pub fn dense_layer_forward(&self, input: &LayerInput, y: Option<ViewMut>, buffers: &mut LayerBuffers) {
        self.attention_half_forward(input, buffers);
        self.mlp_half_forward(input, y, buffers);
    }

    /// Computes the backward pass of one decoder layer whose MLP is dense (not a mixture of
    /// experts). `dx`, `[rows, hidden]`, is the gradient of the layer's output on entry and of its
    /// input on return. Overwrites `grads`, the gradient of the layer's unit.
    pub fn dense_layer_backward(
        &self,
        input: &LayerInput,
        mut grads: ViewMut,
        mut dx: ViewMut,
        buffers: &mut LayerBuffers,
    ) {
        for span in self.spans.list_norm_and_bias_spans() {
            input.ops.fill_with_zeros(grads.slice_mut(span));
        }
        self.mlp_half_backward(input, &mut grads, dx.reborrow(), buffers);
        self.attention_half_backward(input, &mut grads, dx, buffers);
    }

    /// Returns the norm before the output layer and the weight matrix `[vocab, hidden]` of the
    /// output layer, which is the embedding matrix if the two are tied.
    fn select_head_norm_and_matrix<'a>(
        &self,
        input: &HeadInput<'a>,
        factors: &'a mut Buf,
    ) -> (RowNorm<'a>, View<'a>) {
        let (norm_len, matrix_len) = (self.config.params_per_norm(), self.embedding_matrix_len());
        let norm = self.create_row_norm(input.ops, input.params, 0..norm_len, factors);
        let matrix = match input.embedding {
            Some(embedding) => embedding.slice(0..matrix_len),
            None => input.params.slice(norm_len..norm_len + matrix_len),
        };
        (norm, matrix)
    }

    /// Computes the logits of one token from `input.x`, the token's row of the last layer's output,
    /// and writes them to `out`, `[vocab]`.
    pub fn compute_single_row_logits(
        &self,
        input: &HeadInput,
        mut out: ViewMut,
        scratch: &mut ActivationBuffers,
    ) {
        let (d, v) = (self.config.sizes.hidden, self.config.sizes.vocab);
        let ScratchBuffers { norm: normed, norm_factors, head_stats, .. } = scratch.borrow_as_struct_mut();
        let (norm, matrix) = self.select_head_norm_and_matrix(input, norm_factors);
        let mut row = normed.view_mut().slice(0..d);
        norm.forward(
            row.reborrow(),
            head_stats.view_mut().slice(0..self.config.norm_stats_per_row()),
            input.x,
        );
        input.ops.matmul_forward(out.reborrow(), row.as_view(), matrix, 1, v, d, WriteMode::Overwrite);
        if let Some(cap) = self.config.logit_softcap {
            input.ops.softcap(out, cap);
        }
    }

    /// Computes each token's logits from the output of the last layer, and writes the cross-entropy
    /// loss against the token's label to `loss`. Also computes the backward pass if `grads` are
    /// given.
    pub fn compute_head_loss(
        &self,
        input: &HeadInput,
        labels: &[u32],
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut ActivationBuffers,
    ) {
        let (ops, sizes, softcap) = (input.ops, self.config.sizes, self.config.logit_softcap);
        let shape = ClassifierShape { m: labels.len(), d: sizes.hidden, v: sizes.vocab, softcap };
        let ScratchBuffers { norm: normed, dnorm, norm_factors, head_stats, .. } =
            scratch.borrow_as_struct_mut();
        let (norm, matrix) = self.select_head_norm_and_matrix(input, norm_factors);
        norm.forward(normed.view_mut(), head_stats.view_mut(), input.x);
        let x = normed.view();
        let Some(g) = grads else {
            return ops.compute_classifier_loss(loss, x, matrix, labels, shape, None);
        };
        let (mut norm_grads, matrix_grad) = g.head.split_at(self.config.params_per_norm());
        ops.fill_with_zeros(norm_grads.reborrow());
        let dw = g.embedding.map_or(matrix_grad, |embedding| {
            let (dw, positions) = embedding.split_at(self.embedding_matrix_len());
            if !positions.is_empty() {
                // The gradient of positions begins at zero.
                ops.fill_with_zeros(positions);
            }
            dw
        });
        // The op skips an empty gradient.
        let dw = if self.needs_head_grad { dw } else { dw.slice(0..0) };
        let out =
            ClassifierGrads { dx: dnorm.view_mut(), dw, dw_write: WriteMode::Overwrite, scale: g.scale };
        ops.compute_classifier_loss(loss, x, matrix, labels, shape, Some(out));
        let x_and_stats = (input.x, head_stats.view());
        norm.backward(&mut norm_grads, g.dx, dnorm.view(), x_and_stats, WriteMode::Overwrite);
    }
}
