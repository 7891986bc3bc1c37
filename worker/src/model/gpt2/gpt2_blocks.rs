//! The [`Blocks`] of a [`Gpt2Model`]: embedding, layers and head.
use super::{
    gpt2_buffers::{SavedBuffers, ScratchBuffers},
    gpt2_model::Gpt2Model,
};
use crate::model::{
    activation_buffers::{ActivationBuffers, BufferSpec, list_buffers},
    blocks::{Blocks, HeadGrads, HeadParams, LayerInput},
    micro_batch::MicroBatch,
    model_interface::Model,
};
use device::{
    Ops, View, ViewMut,
    ops::{ClassifierGrads, LayerNormParams, WriteMode},
};

impl Gpt2Model {
    /// Returns the final norm and the head's matrix, `[vocab, hidden]`. The matrix is the token
    /// embedding if head and embedding are tied.
    fn select_head_weights<'a>(&self, p: &HeadParams<'a>) -> (LayerNormParams<'a>, View<'a>) {
        let d = self.config.sizes.hidden;
        let norm =
            LayerNormParams { w: p.head.slice(0..d), b: p.head.slice(d..2 * d), eps: self.config.norm_eps };
        let matrix = match p.embedding {
            Some(embedding) => embedding.slice(0..self.token_embedding_len()),
            None => p.head.slice(2 * d..2 * d + self.token_embedding_len()),
        };
        (norm, matrix)
    }

    /// Returns the range of the first `t` position embeddings in the embedding unit.
    fn position_embedding_span(&self, t: usize) -> std::ops::Range<usize> {
        self.token_embedding_len()..self.token_embedding_len() + t * self.config.sizes.hidden
    }
}

impl Model for Gpt2Model {}

impl Blocks for Gpt2Model {
    fn saved_buffers(&self, b: usize, t: usize) -> Vec<BufferSpec> {
        list_buffers(SavedBuffers::declare(&self.config, b, t))
    }

    fn scratch_buffers(&self, b: usize, t: usize) -> Vec<BufferSpec> {
        let lora = self.linears.declare_scratch(b * t);
        list_buffers(ScratchBuffers::declare(&self.config, b * t, lora))
    }

    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &MicroBatch, mut x: ViewMut) {
        let (b, t, d) = (batch.sequences, batch.seq_len, self.config.sizes.hidden);
        ops.embedding_forward(x.reborrow(), params.slice(0..self.token_embedding_len()), &batch.tokens, d);
        // Every sequence is one row of t·d elements, to which the positions are added like a bias.
        ops.bias_forward(x.reborrow(), params.slice(self.position_embedding_span(t)), b, t * d);
        self.embedding_dropout.apply_dropout(ops, batch, d, x);
    }

    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &MicroBatch, mut dx: ViewMut) {
        let (b, t, d) = (batch.sequences, batch.seq_len, self.config.sizes.hidden);
        self.embedding_dropout.apply_dropout(ops, batch, d, dx.reborrow());
        let (tokens, positions) = grads.split_at(self.token_embedding_len());
        ops.embedding_backward(tokens, dx.as_view(), &batch.tokens, d);
        ops.bias_backward(positions.slice(0..t * d), dx.as_view(), b, t * d);
    }

    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        self.attention_forward(ops, input, saved, scratch);
        self.mlp_forward(ops, input, y, saved, scratch);
    }

    fn layer_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        mut dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let mut g = grads;
        for span in self.spans.list_accumulated_spans() {
            ops.clear(g.slice_mut(span));
        }
        self.mlp_backward(ops, input, &mut g, dx.reborrow(), saved, scratch);
        self.attention_backward(ops, input, &mut g, dx, saved, scratch);
    }

    fn compute_logits(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        x: View,
        out: ViewMut,
        scratch: &mut ActivationBuffers,
    ) {
        let (d, v) = (self.config.sizes.hidden, self.config.sizes.vocab);
        let (norm, matrix) = self.select_head_weights(&params);
        let ScratchBuffers { norm: row, head_stats, .. } = scratch.borrow_set_mut();
        let mut row = row.view_mut().slice(0..d);
        ops.layernorm_forward(row.reborrow(), head_stats.view_mut().slice(0..2), x, norm, 1);
        ops.compute_logits(out, row.as_view(), matrix, 1, d, v);
    }

    fn compute_head_loss(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        batch: &MicroBatch,
        x: View,
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut ActivationBuffers,
    ) {
        let (m, d, v) = (batch.rows(), self.config.sizes.hidden, self.config.sizes.vocab);
        let (norm, matrix) = self.select_head_weights(&params);
        let ScratchBuffers { norm: rows, dnorm: drows, head_stats, .. } = scratch.borrow_set_mut();
        ops.layernorm_forward(rows.view_mut(), head_stats.view_mut(), x, norm, m);
        let Some(g) = grads else {
            return ops.compute_classifier_loss(loss, rows.view(), matrix, &batch.labels, m, d, v, None);
        };
        let (mut dnorm, rest) = g.head.split_at(2 * d);
        ops.clear(dnorm.reborrow());
        let dw = match g.embedding {
            Some(embedding) => {
                // Gradients are overwritten; the gradient of positions begins at zero.
                let (dw, positions) = embedding.split_at(self.token_embedding_len());
                ops.clear(positions);
                dw
            }
            None => rest,
        };
        // The op skips an empty gradient.
        let dw = if self.needs_head_grad { dw } else { dw.slice(0..0) };
        let out =
            ClassifierGrads { dx: drows.view_mut(), dw, dw_write: WriteMode::Overwrite, scale: g.scale };
        ops.compute_classifier_loss(loss, rows.view(), matrix, &batch.labels, m, d, v, Some(out));
        let (dw, db) = dnorm.split_at(d);
        ops.layernorm_backward(
            g.dx,
            dw,
            db,
            drows.view(),
            x,
            norm.w,
            head_stats.view(),
            m,
            WriteMode::Overwrite,
        );
    }
}
