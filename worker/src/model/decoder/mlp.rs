//! The second half of a layer: residual add, norm, SwiGLU, residual add.
use super::{Decoder, each};
use crate::model::{Activations, LayerInput};
use device::{Ops, View, ViewMut, ops::Write};

impl Decoder {
    /// `mid` comes in as attention's projected output and leaves as the residual stream after attention.
    pub(super) fn mlp_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, s) = (input.params, &self.spans);
        let (m, d, f) = (input.batch.rows(), self.n.hidden, self.n.intermediate);
        let [_, _, _, _, mid, rstd2, gate_up, ..] = each::<9>(saved);
        let [norm, _, act, ..] = each::<6>(scratch);
        let (w_post, eps) = (p.slice(s.post_norm.clone()), self.n.eps);
        let x = input.x;
        ops.add_rmsnorm_forward(norm.view_mut(), rstd2.view_mut(), mid.view_mut(), x, w_post, m, d, eps);
        let w_gate_up = p.slice(s.gate_up.clone());
        ops.matmul_forward(gate_up.view_mut(), norm.view(), w_gate_up, m, 2 * f, d, Write::Set);
        if let Some(bias) = &s.gate_up_bias {
            ops.bias_forward(gate_up.view_mut(), p.slice(bias.clone()), m, 2 * f);
        }
        let Some(mut y) = y else { return };
        ops.swiglu_forward(act.view_mut(), gate_up.view(), m, f);
        ops.matmul_forward(y.reborrow(), act.view(), p.slice(s.down.clone()), m, d, f, Write::Set);
        if let Some(bias) = &s.down_bias {
            ops.bias_forward(y.reborrow(), p.slice(bias.clone()), m, d);
        }
        ops.add(y, mid.view());
    }

    /// `dx` becomes the gradient of the residual stream after attention.
    pub(super) fn mlp_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut [f32],
        dx: ViewMut,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, s) = (input.params, &self.spans);
        let (m, d, f) = (input.batch.rows(), self.n.hidden, self.n.intermediate);
        let [_, _, _, _, mid, rstd2, gate_up, ..] = each::<9>(saved);
        let [norm, dnorm, act, dgate_up, ..] = each::<6>(scratch);
        ops.swiglu_forward(act.view_mut(), gate_up.view(), m, f);
        if let Some(bias) = &s.down_bias {
            ops.bias_backward((&mut g[bias.clone()]).into(), dx.as_view(), m, d);
        }
        let wanted = self.wanted[input.layer];
        if wanted.down {
            let dw_down = (&mut g[s.down.clone()]).into();
            ops.matmul_backward_weight(dw_down, dx.as_view(), act.view(), m, d, f, Write::Set);
        }
        let w_down = p.slice(s.down.clone());
        ops.matmul_backward_input(act.view_mut(), dx.as_view(), w_down, m, d, f, Write::Set);
        ops.swiglu_backward(dgate_up.view_mut(), act.view(), gate_up.view(), m, f);
        if let Some(bias) = &s.gate_up_bias {
            ops.bias_backward((&mut g[bias.clone()]).into(), dgate_up.view(), m, 2 * f);
        }
        let w_post = p.slice(s.post_norm.clone());
        ops.rmsnorm_forward(norm.view_mut(), rstd2.view_mut(), mid.view(), w_post, m, d, self.n.eps);
        if wanted.gate_up {
            let dw_gate_up = (&mut g[s.gate_up.clone()]).into();
            ops.matmul_backward_weight(dw_gate_up, dgate_up.view(), norm.view(), m, 2 * f, d, Write::Set);
        }
        let w_gate_up: View = p.slice(s.gate_up.clone());
        ops.matmul_backward_input(dnorm.view_mut(), dgate_up.view(), w_gate_up, m, 2 * f, d, Write::Set);
        let dw_post = (&mut g[s.post_norm.clone()]).into();
        ops.rmsnorm_backward(dx, dw_post, dnorm.view(), mid.view(), w_post, rstd2.view(), m, d, Write::Add);
    }
}
