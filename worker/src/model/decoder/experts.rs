//! The second half of a layer with experts: residual add, norm, router; and the weighted sum of what the experts give.
use super::{Decoder, Numbers, each};
use crate::model::{
    Activations, LayerInput,
    experts::{ExpertShape, Returned, RouterLosses, Routing, Sparse},
};
use crate::params::{Init, ParamSpec};
use device::{Ops, View, ViewMut, ops::Write};

/// What a family says of its experts.
pub(in crate::model) struct ExpertNumbers {
    pub(in crate::model) shape: ExpertShape,
    pub(in crate::model) losses: RouterLosses,
    /// Of each layer: has it experts?
    pub(in crate::model) sparse: Vec<bool>,
    pub(in crate::model) names: ExpertNames,
}

/// Names of the tensors on disk.
pub(in crate::model) struct ExpertNames {
    /// The block of router and experts.
    pub(in crate::model) block: &'static str,
    /// Gate, up and down of an expert.
    pub(in crate::model) matrices: [&'static str; 3],
}

impl Numbers {
    /// Has this layer experts?
    pub(super) fn is_sparse(&self, layer: usize) -> bool {
        self.experts.as_ref().is_some_and(|e| e.sparse.get(layer).is_some_and(|s| *s))
    }

    /// Width of gate and up in layers without experts; 0 when all have some.
    pub(super) fn dense_width(&self) -> usize {
        let any = (0..self.layers).any(|l| !self.is_sparse(l));
        if any { self.intermediate } else { 0 }
    }
}

impl Decoder {
    fn experts(&self) -> &ExpertNumbers {
        self.n.experts.as_ref().expect("only a model with experts is asked for them")
    }

    /// The router's matrix in the flat vector of a layer with experts.
    pub(super) fn router(&self) -> std::ops::Range<usize> {
        let at = self.spans.post_norm.end;
        at..at + self.experts().shape.experts * self.n.hidden
    }
}

impl Sparse for Decoder {
    fn shape(&self) -> ExpertShape {
        self.experts().shape
    }

    fn is_sparse(&self, layer: usize) -> bool {
        self.n.is_sparse(layer)
    }

    fn losses(&self) -> RouterLosses {
        self.experts().losses
    }

    fn expert_params(&self, layer: usize, expert: usize) -> Vec<ParamSpec> {
        let ExpertNumbers { shape: s, names, .. } = self.experts();
        let [gate, up, down] = names.matrices;
        let tensor = |name: &str, shape: Vec<usize>| ParamSpec {
            name: format!("model.layers.{layer}.{}.experts.{expert}.{name}.weight", names.block),
            shape,
            init: Init::Normal(self.n.std),
        };
        let inward = vec![s.intermediate, s.hidden];
        vec![tensor(gate, inward.clone()), tensor(up, inward), tensor(down, vec![s.hidden, s.intermediate])]
    }

    fn route_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        routing: &mut Routing,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        self.attention_forward(ops, input, saved, scratch);
        let (p, m, d, shape) = (input.params, input.batch.rows(), self.n.hidden, self.shape());
        let [_, _, _, _, mid, rstd2, ..] = each::<9>(saved);
        let [norm, _, _, _, _, _, room, logits] = each::<8>(scratch);
        let w_post = self.norm_factors(ops, p.slice(self.spans.post_norm.clone()), room);
        let (normed, rstd2, eps) = (norm.view_mut(), rstd2.view_mut(), self.n.eps);
        ops.add_rmsnorm_forward(normed, rstd2, mid.view_mut(), input.x, w_post, m, d, eps);
        let w = p.slice(self.router());
        ops.matmul_forward(logits.view_mut(), norm.view(), w, m, shape.experts, d, Write::Set);
        routing.forward(ops, logits.view(), shape);
    }

    fn normed<'a>(&self, scratch: &'a Activations) -> View<'a> {
        scratch.0[0].view()
    }

    fn combine_forward(
        &self,
        ops: &dyn Ops,
        mut y: ViewMut,
        rows: View,
        places: &[u32],
        routing: &Routing,
        saved: &mut Activations,
    ) {
        let [_, _, _, _, mid, ..] = each::<9>(saved);
        let d = self.n.hidden;
        let (m, weights) = (y.len() / d, Some(routing.weights.view()));
        ops.combine_rows(y.reborrow(), rows, weights, places, m, d, Write::Set);
        ops.add(y, mid.view());
    }

    fn route_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        mut dx: ViewMut,
        back: &Returned,
        routing: &Routing,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, m, d, shape) = (input.params, input.batch.rows(), self.n.hidden, self.shape());
        let (mut g, router) = (grads, self.router());
        for span in self.spans.summed().filter(|s| s.end <= router.start) {
            ops.clear(g.slice_mut(span));
        }
        let [_, _, _, _, mid, rstd2, ..] = each::<9>(saved);
        let [norm, dnorm, _, _, _, _, room, dlogits] = each::<8>(scratch);
        ops.combine_rows(dnorm.view_mut(), back.rows, None, back.places, m, d, Write::Set);
        routing.backward(ops, dlogits.view_mut(), back, shape);
        let w_post = self.norm_factors(ops, p.slice(self.spans.post_norm.clone()), room);
        ops.rmsnorm_forward(norm.view_mut(), rstd2.view_mut(), mid.view(), w_post, m, d, self.n.eps);
        if self.wanted[input.layer].router {
            let dw = g.slice_mut(router.clone());
            ops.matmul_backward_weight(dw, dlogits.view(), norm.view(), m, shape.experts, d, Write::Set);
        }
        let w = p.slice(router);
        ops.matmul_backward_input(dnorm.view_mut(), dlogits.view(), w, m, shape.experts, d, Write::Add);
        let dw_post = g.slice_mut(self.spans.post_norm.clone());
        let (dy, x, rstd) = (dnorm.view(), mid.view(), rstd2.view());
        ops.rmsnorm_backward(dx.reborrow(), dw_post, dy, x, w_post, rstd, m, d, Write::Add);
        self.attention_backward(ops, input, &mut g, dx, saved, scratch);
    }
}
