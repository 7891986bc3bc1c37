//! Ops for mixtures of experts: the router that selects the experts, and ops on the rows of tokens
//! that are sent to them.
use super::arguments::{WriteMode, expect_len};
use crate::buffer::{View, ViewMut};

/// Ops for the router of a mixture-of-experts layer: the forward and the backward pass.
pub trait RouterOps {
    /// Selects the experts of each token in a mixture-of-experts layer: computes the softmax of
    /// `logits[m, experts]`, and picks the experts with the largest probabilities.
    ///
    /// - `probs[m, experts]` receives the softmax of each row of `logits`.
    /// - `lse[m]` receives the log-sum-exp of each row of `logits`.
    /// - `chosen_experts[m, experts_per_token]` receives the experts with the largest probabilities
    ///   in descending order; of equal ones the lower index comes first. It is `None` if the caller
    ///   knows them from an earlier call with the same arguments. Then no backend waits for a
    ///   device.
    /// - `weights[m, experts_per_token]` receives the factors of the chosen experts' outputs. These
    ///   are the experts' probabilities, divided by their sum over the token's chosen experts if
    ///   [`RouterShape::normalize_weights`] is set.
    fn router_forward(
        &self,
        probs: ViewMut,
        weights: ViewMut,
        lse: ViewMut,
        chosen_experts: Option<&mut [u32]>,
        logits: View,
        shape: RouterShape,
    );
    /// Computes the gradient of the loss with respect to the router's logits, and writes it to
    /// `dlogits`. `dweights` is the gradient of the output `weights` of
    /// [`RouterOps::router_forward`]. The selection of experts itself has no gradient.
    fn router_backward(
        &self,
        dlogits: ViewMut,
        dweights: View,
        inputs: RouterBackwardInputs,
        shape: RouterShape,
    );
}

/// Sizes of a mixture-of-experts router: number of tokens (rows), number of experts, and number of
/// experts that process each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterShape {
    /// Number of tokens. The logits of each token are one row.
    pub m: usize,
    /// Number of experts of the layer.
    pub experts: usize,
    /// Number of experts to which each token is sent, at least 1.
    pub experts_per_token: usize,
    /// True if the probabilities of a token's selected experts are divided by their sum.
    pub normalize_weights: bool,
}

impl RouterShape {
    /// Panics if the number of experts per token is invalid, or if an argument of the router
    /// operation `op` has a wrong number of elements. `matrices` have an element per token and
    /// expert, and `lists` one per token and selected expert.
    pub(crate) fn check_arguments(
        &self,
        op: &str,
        matrices: &[(&str, usize)],
        lists: &[(&str, usize)],
        lse: usize,
    ) {
        let RouterShape { m, experts, experts_per_token, .. } = *self;
        assert!(
            (1..=experts).contains(&experts_per_token),
            "{op}: experts_per_token is {experts_per_token}, not in 1..={experts}"
        );
        matrices.iter().for_each(|(name, len)| expect_len(op, name, *len, m * experts));
        lists.iter().for_each(|(name, len)| expect_len(op, name, *len, m * experts_per_token));
        expect_len(op, "lse", lse, m);
    }
}

/// Inputs from which a router's backward pass computes the gradient of the logits: values from the
/// forward pass, and coefficients of the router losses.
#[derive(Clone, Copy)]
pub struct RouterBackwardInputs<'a> {
    /// Probabilities that the forward pass computed, `[m, experts]`.
    pub probs: View<'a>,
    /// Log-sum-exp of each row's logits from the forward pass, `[m]`.
    pub lse: View<'a>,
    /// Experts that the forward pass selected, `[m, experts_per_token]`.
    pub chosen_experts: &'a [u32],
    /// Gradient of the load-balancing loss with respect to the probabilities, `[experts]`. All rows
    /// of `probs` have this gradient.
    pub balance_grad: &'a [f32],
    /// Coefficient of the z-loss Σ lse², whose gradient is added.
    pub z_loss_coef: f32,
}

impl RouterBackwardInputs<'_> {
    /// Panics if an argument of the router's backward pass has a number of elements that does not
    /// agree with `shape`. `dlogits` and `dweights` are lengths.
    pub(crate) fn check_arguments(&self, dlogits: usize, dweights: usize, shape: RouterShape) {
        let op = "router_backward";
        let matrices = [("dlogits", dlogits), ("probs", self.probs.len())];
        let lists = [("dweights", dweights), ("chosen_experts", self.chosen_experts.len())];
        shape.check_arguments(op, &matrices, &lists, self.lse.len());
        expect_len(op, "balance_grad", self.balance_grad.len(), shape.experts);
    }
}

/// Operations of mixture-of-experts layers on the rows of tokens: copying selected rows, weighted
/// sums and dot products of rows, and scaling of rows.
pub trait RowOps {
    /// Copies the rows of `x` with the indices `rows` to consecutive rows of `y`: `y[i, d] =
    /// x[rows[i], d]`.
    fn gather_rows(&self, y: ViewMut, x: View, rows: &[u32], d: usize);
    /// Computes weighted sums of rows: `y[m, d] (=|+=) Σ_k weights[m, k] · x[row_indices[m, k],
    /// d]`, in the order of `k`. If `weights` is `None`, every weight is 1.
    fn combine_rows(
        &self,
        y: ViewMut,
        x: View,
        weights: Option<View>,
        row_indices: &[u32],
        m: usize,
        d: usize,
        write: WriteMode,
    );
    /// Computes the dot product of each row of `a` with the same row of `b`: `out[m] = Σ_i a[m, i]
    /// · b[m, i]`, where `i < d`.
    fn dot_rows(&self, out: ViewMut, a: View, b: View, d: usize);
    /// Multiplies each row by its factor: `x[m, d] *= factors[m]`.
    fn scale_rows(&self, x: ViewMut, factors: View, d: usize);
}
