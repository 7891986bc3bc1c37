//! The [`Blocks`] of a [`DecoderModel`]: embedding, layers and head.
use super::{
    decoder_buffers::{SavedBuffers, ScratchBuffers},
    decoder_model::DecoderModel,
};
use crate::model::{
    activation_buffers::{ActivationBuffers, BufferSpec, list_buffers},
    blocks::{Blocks, HeadGrads, HeadParams, LayerInput},
    micro_batch::MicroBatch,
    model_interface::Model,
    moe::MoeModel,
};
use device::{
    Ops, View, ViewMut,
    ops::{ClassifierGrads, WriteMode},
};

impl DecoderModel {
    /// Returns the head's matrix, `[vocab, hidden]`, and the weight of the final norm. The matrix
    /// is the embedding if head and embedding are tied.
    fn select_head_weights<'a>(&self, p: &HeadParams<'a>) -> (View<'a>, View<'a>) {
        let d = self.config.sizes.hidden;
        let norm = p.head.slice(0..d);
        let matrix = p.embedding.unwrap_or_else(|| p.head.slice(d..d + self.config.sizes.vocab * d));
        (matrix, norm)
    }
}

impl Model for DecoderModel {
    fn as_moe_model(&self) -> Option<&dyn MoeModel> {
        self.config.moe.as_ref().map(|_| self as &dyn MoeModel)
    }
}

impl Blocks for DecoderModel {
    fn saved_buffers(&self, b: usize, t: usize) -> Vec<BufferSpec> {
        list_buffers(SavedBuffers::declare(&self.config, b, t))
    }

    fn scratch_buffers(&self, b: usize, t: usize) -> Vec<BufferSpec> {
        let lora = self.linears.declare_scratch(b * t);
        list_buffers(ScratchBuffers::declare(&self.config, b * t, lora))
    }

    fn move_to_device(&mut self, ops: &dyn Ops) {
        self.rope_tables.move_to_device(ops);
        if let Some(tables) = &mut self.sliding_rope_tables {
            tables.move_to_device(ops);
        }
    }

    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &MicroBatch, mut x: ViewMut) {
        ops.embedding_forward(x.reborrow(), params, &batch.tokens, self.config.sizes.hidden);
        if let Some(scale) = self.config.embedding_scale {
            ops.scale(x, scale);
        }
    }

    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &MicroBatch, mut dx: ViewMut) {
        if let Some(scale) = self.config.embedding_scale {
            ops.scale(dx.reborrow(), scale);
        }
        if let Some(padding) = self.config.padding_token {
            let (d, mut end) = (self.config.sizes.hidden, 0);
            for run in batch.tokens.chunk_by(|a, b| (*a == padding) == (*b == padding)) {
                end += run.len();
                if run[0] == padding {
                    ops.clear(dx.slice_mut((end - run.len()) * d..end * d));
                }
            }
        }
        ops.embedding_backward(grads, dx.as_view(), &batch.tokens, self.config.sizes.hidden);
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
        mut out: ViewMut,
        scratch: &mut ActivationBuffers,
    ) {
        let (d, v) = (self.config.sizes.hidden, self.config.sizes.vocab);
        let (matrix, w_norm) = self.select_head_weights(&params);
        let ScratchBuffers { norm, norm_factors, head_rstd, .. } = scratch.borrow_set_mut();
        let (mut norm, w_norm) =
            (norm.view_mut().slice(0..d), self.compute_norm_factors(ops, w_norm, norm_factors));
        ops.rmsnorm_forward(
            norm.reborrow(),
            head_rstd.view_mut().slice(0..1),
            x,
            w_norm,
            1,
            d,
            self.config.norm_eps,
        );
        ops.compute_logits(out.reborrow(), norm.as_view(), matrix, 1, d, v);
        if let Some(cap) = self.config.logit_softcap {
            ops.softcap(out, cap);
        }
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
        let (m, d, v, eps) =
            (batch.rows(), self.config.sizes.hidden, self.config.sizes.vocab, self.config.norm_eps);
        let (matrix, w_norm) = self.select_head_weights(&params);
        let ScratchBuffers { norm, dnorm, norm_factors, head_rstd, .. } = scratch.borrow_set_mut();
        let (w_norm, cap) = (self.compute_norm_factors(ops, w_norm, norm_factors), self.config.logit_softcap);
        ops.rmsnorm_forward(norm.view_mut(), head_rstd.view_mut(), x, w_norm, m, d, eps);
        let Some(g) = grads else {
            return ops.compute_softcapped_classifier_loss(
                loss,
                norm.view(),
                matrix,
                &batch.labels,
                m,
                d,
                v,
                cap,
                None,
            );
        };
        let (mut dw_norm, rest) = g.head.split_at(d);
        ops.clear(dw_norm.reborrow());
        let dw = g.embedding.unwrap_or(rest);
        // The op skips an empty gradient.
        let dw = if self.needs_head_grad { dw } else { dw.slice(0..0) };
        let out =
            ClassifierGrads { dx: dnorm.view_mut(), dw, dw_write: WriteMode::Overwrite, scale: g.scale };
        ops.compute_softcapped_classifier_loss(
            loss,
            norm.view(),
            matrix,
            &batch.labels,
            m,
            d,
            v,
            cap,
            Some(out),
        );
        ops.rmsnorm_backward(
            g.dx,
            dw_norm,
            dnorm.view(),
            x,
            w_norm,
            head_rstd.view(),
            m,
            d,
            WriteMode::Overwrite,
        );
    }
}
