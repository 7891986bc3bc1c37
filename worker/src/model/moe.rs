//! Mixture-of-experts layers: the forward and backward pass of routers and experts, and the losses
//! that train the routers.
//!
//! Experts may be on other ranks than the tokens, so a layer is computed in parts: attention and
//! router, token dispatch, experts, return of the rows, and weighted sum. The model computes the
//! first and the last part; the functions of this module compute the experts.
use device::{
    Buf, Dtype, Ops, View, ViewMut,
    ops::{RouterShape, RowGroup},
    storage::{DeviceError, Event},
};
use jobspec::ExpertsSpec;
use std::ops::Range;

/// The sizes and router options of a model's mixture-of-experts layers: experts per layer, experts
/// per token, and the widths of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// The number of experts of a layer.
    pub experts: usize,
    /// The number of experts that are selected for each token (top-k).
    pub per_token: usize,
    /// The width of the experts' inputs and outputs, which is that of the residual stream.
    pub hidden: usize,
    /// The width between the two matmuls of an expert.
    pub intermediate: usize,
    /// Whether the router's factors for the selected experts of a token are divided by their sum,
    /// so that they add up to 1.
    pub normalize_weights: bool,
}

impl ExpertShape {
    /// Returns the number of parameter elements of one expert: the matrices gate and up,
    /// `[intermediate, hidden]` each, and down, `[hidden, intermediate]`.
    pub fn expert_len(&self) -> usize {
        3 * self.intermediate * self.hidden
    }

    /// Returns the sizes and options with which the compute backend runs a router on `m` tokens.
    fn to_router_shape(self, m: usize) -> RouterShape {
        RouterShape {
            m,
            experts: self.experts,
            experts_per_token: self.per_token,
            normalize_weights: self.normalize_weights,
        }
    }

    /// Returns, for each expert, the range of its input rows and the position of its gate and up
    /// matrices, as arguments of a grouped matmul.
    fn build_gate_up_groups(&self, rows: &[Range<usize>]) -> Vec<RowGroup> {
        self.build_expert_groups(rows, 0)
    }

    /// Returns, for each expert, the range of its input rows and the position of its
    /// down-projection matrix, as arguments of a grouped matmul.
    fn build_down_groups(&self, rows: &[Range<usize>]) -> Vec<RowGroup> {
        self.build_expert_groups(rows, 2 * self.intermediate * self.hidden)
    }

    /// Returns, for each expert, the range of its input rows and the position of one of its
    /// matrices in the flat vector of all experts' parameters. `offset` is where the matrix begins
    /// among the parameters of one expert.
    fn build_expert_groups(&self, rows: &[Range<usize>], offset: usize) -> Vec<RowGroup> {
        let group = |(i, r): (usize, &Range<usize>)| RowGroup {
            rows: r.clone(),
            matrix_offset: i * self.expert_len() + offset,
        };
        rows.iter().enumerate().map(group).collect()
    }
}

/// The factors with which the losses that affect only routers (load-balancing loss and z-loss) are
/// weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLossCoefficients {
    /// The coefficient of the load-balancing loss, `router_aux_loss_coef` of transformers (Switch
    /// Transformer, Fedus et al. 2021).
    pub aux: f64,
    /// The coefficient of the z-loss, the mean of lse² of the router's logits (ST-MoE, Zoph et al.
    /// 2022).
    pub z: f64,
}

/// The results of a layer's router for one micro-batch: for each token, the probabilities, the
/// weights of the selected experts. A row belongs to one token of the micro-batch. Every buffer is
/// f32.
pub struct RouterOutput {
    /// The softmax of the router's logits, `[rows, experts]`.
    pub probs: Buf,
    /// The factors by which the outputs of each token's selected experts are multiplied,
    /// `[rows, per_token]`. These are not parameters.
    pub weights: Buf,
    /// The log-sum-exp of the router's logits, `[rows]`.
    pub lse: Buf,
}

impl RouterOutput {
    /// Allocates the router's output buffers for micro-batches of `m` tokens.
    pub fn new(ops: &dyn Ops, shape: ExpertShape, m: usize) -> Self {
        let floats = |len| ops.zeroed(Dtype::F32, len);
        RouterOutput {
            probs: floats(m * shape.experts),
            weights: floats(m * shape.per_token),
            lse: floats(m),
        }
    }

    /// Returns the total number of elements of all buffers of a router's output, for micro-batches
    /// of `m` tokens.
    pub fn count_output_elements(shape: ExpertShape, m: usize) -> usize {
        m * (shape.experts + shape.per_token + 1)
    }

    /// Computes the router's output from `logits`, `[rows, experts]`: probabilities, and the
    /// experts of each token with their weights. Overwrites `self`.
    ///
    /// Writes the selected experts of each token, `[rows, per_token]`, by descending probability,
    /// to `selected_experts`, which is `None` if they are known from an earlier call
    /// (recomputation).
    pub(super) fn router_forward(
        &mut self,
        ops: &dyn Ops,
        logits: View,
        shape: ExpertShape,
        selected_experts: Option<&mut [u32]>,
    ) {
        let (probs, weights) = (self.probs.view_mut(), self.weights.view_mut());
        let router = shape.to_router_shape(self.lse.len());
        ops.router_forward(probs, weights, self.lse.view_mut(), selected_experts, logits, router);
    }

    /// Computes `dlogits`, `[rows, experts]`, the gradient of the router's logits, from the
    /// gradients of the router's output weights and of the router losses.
    pub(super) fn router_backward(
        &self,
        ops: &dyn Ops,
        dlogits: ViewMut,
        grads: &RouterBackwardGrads,
        shape: ExpertShape,
    ) {
        let inputs = device::ops::RouterBackwardInputs {
            probs: self.probs.view(),
            lse: self.lse.view(),
            chosen_experts: grads.selected_experts,
            balance_grad: grads.balance_grad,
            z_loss_coef: grads.z_loss_coef,
        };
        ops.router_backward(dlogits, grads.dweights, inputs, shape.to_router_shape(self.lse.len()));
    }
}

/// The inputs of the backward pass of a layer's router and attention: the gradients from the
/// layer's experts, and those of the router losses.
pub struct RouterBackwardGrads<'a> {
    /// The gradients of the experts' inputs, one row for each token and each of its selected
    /// experts, `[dispatched rows, hidden]`.
    pub rows: View<'a>,
    /// The selected experts of each token, `[rows, per_token]`.
    pub selected_experts: &'a [u32],
    /// For each token and each of its selected experts, the index of the token's row in `rows`,
    /// `[rows, per_token]`.
    pub choice_rows: &'a [u32],
    /// The gradients of the factors in [`RouterOutput::weights`], `[rows, per_token]`.
    pub dweights: View<'a>,
    /// The gradient of the load-balancing loss with respect to the router's probabilities for one
    /// token, `[experts]`. The gradient is equal for all tokens.
    pub balance_grad: &'a [f32],
    /// The factor of Σ lse² in the loss, by which the z-loss contributes to the gradient.
    pub z_loss_coef: f32,
}

/// The inputs of the experts' forward pass: the parameters of several experts, and one row for each
/// pair of a token and its chosen expert, sorted by expert.
pub struct ExpertInputs<'a> {
    /// The flat vector of the parameters of the experts.
    pub params: View<'a>,
    /// For each expert, the range of its inputs in `rows`.
    pub expert_ranges: &'a [Range<usize>],
    /// The experts' inputs, `[rows, hidden]`.
    pub rows: View<'a>,
}

/// Runs the forward pass of several experts (SwiGLU networks) on the token rows that were
/// dispatched to them. Writes the outputs of the gate and up projections to `gate_up`, `[rows,
/// 2·intermediate]`.
///
/// If `out` is `Some`, also writes the outputs of the experts to its first view, `[rows, hidden]`.
/// Its second view is scratch memory, `[rows, intermediate]`. If `out` is `None`, computes only
/// `gate_up` (recomputation).
pub fn experts_forward(
    ops: &dyn Ops,
    shape: ExpertShape,
    e: &ExpertInputs,
    mut gate_up: ViewMut,
    out: Option<(ViewMut, ViewMut)>,
) {
    let (d, f) = (shape.hidden, shape.intermediate);
    let n = e.rows.len() / d;
    ops.grouped_forward(
        gate_up.reborrow(),
        e.rows,
        e.params,
        &shape.build_gate_up_groups(e.expert_ranges),
        2 * f,
        d,
    );
    let Some((out, mut act)) = out else { return };
    ops.swiglu_forward(act.reborrow(), gate_up.as_view(), n, f);
    ops.grouped_forward(out, act.as_view(), e.params, &shape.build_down_groups(e.expert_ranges), d, f);
}

/// The inputs, outputs and scratch memory of the backward pass that computes the gradients of the
/// experts' inputs, but not those of the experts' parameters. A row belongs to one token that was
/// dispatched to one expert. Rows are sorted by expert.
pub struct ExpertBackwardBuffers<'a> {
    /// The outputs of the gate and up projections that [`experts_forward`] computed, `[rows,
    /// 2·intermediate]`.
    pub gate_up: View<'a>,
    /// For each row, the gradient of the layer's output for the row's token, `[rows, hidden]`. The
    /// gradient is not multiplied by the router's factor in `weights`.
    pub dy: View<'a>,
    /// For each row, the factor by which the router multiplies the expert's output, `[rows]`.
    pub weights: View<'a>,
    /// Output: the gradients of the factors in `weights`, `[rows]`.
    pub dweights: ViewMut<'a>,
    /// Output: the gradients of the experts' inputs, `[rows, hidden]`.
    pub drows: ViewMut<'a>,
    /// On entry, the result of [`compute_expert_activation`], `[rows, intermediate]`. On return,
    /// each row is multiplied by its factor in `weights`, as [`ExpertGradInputs::act`] requires.
    pub act: ViewMut<'a>,
    /// Scratch memory, `[rows, intermediate]`.
    pub dact: ViewMut<'a>,
    /// Output: the gradients of the outputs of the gate and up projections,
    /// `[rows, 2·intermediate]`.
    pub dgate_up: ViewMut<'a>,
}

/// Computes SwiGLU from the experts' gate and up projections, and writes the result, which is the
/// input of the down projection, to `act`.
pub fn compute_expert_activation(ops: &dyn Ops, shape: ExpertShape, gate_up: View, act: ViewMut) {
    let f = shape.intermediate;
    ops.swiglu_forward(act, gate_up, gate_up.len() / (2 * f), f);
}

/// Computes the gradient of each token row that was an input of the experts `e`, and writes it to
/// the same row of `b.drows`. Also computes the gradient of the factor by which the router
/// multiplies each expert output (`b.dweights`).
///
/// Does not compute gradients of parameters. The caller must then pass `b.act` and `b.dgate_up` to
/// [`compute_expert_param_gradients`], which computes those of the experts' parameters.
pub fn experts_backward_input(ops: &dyn Ops, shape: ExpertShape, e: &ExpertInputs, b: ExpertBackwardBuffers) {
    let (d, f) = (shape.hidden, shape.intermediate);
    let n = b.dweights.len();
    let (act, mut dact, mut dgate_up) = (b.act, b.dact, b.dgate_up);
    ops.grouped_backward_input(
        dact.reborrow(),
        b.dy,
        e.params,
        &shape.build_down_groups(e.expert_ranges),
        d,
        f,
    );
    // The output is not saved; the gradient of its weight is dy · (W a) = (dy W) · a.
    ops.dot_rows(b.dweights, dact.as_view(), act.as_view(), f);
    ops.scale_rows(act, b.weights, f);
    ops.scale_rows(dact.reborrow(), b.weights, f);
    ops.swiglu_backward(dgate_up.reborrow(), dact, b.gate_up, n, f);
    ops.grouped_backward_input(
        b.drows,
        dgate_up.as_view(),
        e.params,
        &shape.build_gate_up_groups(e.expert_ranges),
        2 * f,
        d,
    );
}

/// The inputs of the backward pass that computes the gradients of the experts' parameters, with one
/// row for each pair of a token and its chosen expert. A row belongs to one token that was
/// dispatched to one expert.
pub struct ExpertGradInputs<'a> {
    /// The experts' inputs, `[rows, hidden]`.
    pub rows: View<'a>,
    /// The gradients of the layer's output for the token of each row, `[rows, hidden]`, as in
    /// [`ExpertBackwardBuffers::dy`].
    pub dy: View<'a>,
    /// The input of the down projection, `[rows, intermediate]`, as [`experts_backward_input`] left
    /// it in [`ExpertBackwardBuffers::act`].
    pub act: View<'a>,
    /// The gradients of the outputs of the gate and up projections, `[rows, 2·intermediate]`, from
    /// [`ExpertBackwardBuffers::dgate_up`].
    pub dgate_up: View<'a>,
}

/// Computes the gradients of the experts' parameters. The gradient of an expert is the sum over the
/// rows in its range of `expert_ranges`, and zero if this range is empty.
///
/// Overwrites `grads`, which has the layout of the experts' flat vector of parameters. Does not
/// write the gradient of a matrix if `is_needed` returns false for the matrix's range in this
/// vector.
pub fn compute_expert_param_gradients(
    ops: &dyn Ops,
    shape: ExpertShape,
    expert_ranges: &[Range<usize>],
    g: &ExpertGradInputs,
    mut grads: ViewMut,
    is_needed: impl Fn(Range<usize>) -> bool,
) {
    let (d, f) = (shape.hidden, shape.intermediate);
    let (mut gate_ups, mut downs) =
        (shape.build_gate_up_groups(expert_ranges), shape.build_down_groups(expert_ranges));
    gate_ups.retain(|g| is_needed(g.matrix_offset..g.matrix_offset + 2 * f * d));
    downs.retain(|g| is_needed(g.matrix_offset..g.matrix_offset + f * d));
    ops.grouped_backward_weight(grads.reborrow(), g.dgate_up, g.rows, &gate_ups, 2 * f, d);
    ops.grouped_backward_weight(grads, g.dy, g.act, &downs, d, f);
}

/// The statistics of one micro-batch from which the router losses are computed, such as how often
/// the routers selected each expert.
///
/// The load-balancing loss is that of transformers' `load_balancing_loss_func`: `experts · Σ_e f_e
/// · P_e` over the rows of all layers together. `f_e` is the number of selections of expert e per
/// row, and `P_e` is the mean probability of expert e.
pub struct RouterStats {
    shape: ExpertShape,
    coefficients: RouterLossCoefficients,
    /// The statistics of each layer with experts.
    layers: Vec<LayerRouterStats>,
    /// The number of tokens of the micro-batch.
    rows: usize,
    /// On a device that is not the host: for each layer, the sums of the probabilities of each
    /// expert, and the sum of the squared log-sum-exp.
    device_sums: Buf,
    /// Host memory for copies of `device_sums`, one for each micro-batch of a step.
    host_sums: Buf,
    /// The event after which all copies that were started are complete.
    copied: Event,
}

/// The sum of all router losses of a micro-batch, which is either known or will be computed from
/// statistics that are still being copied from the GPU.
pub enum PendingRouterLoss {
    /// The sum of the router losses.
    Known(f64),
    /// The sums are copied to the host as copy number `copy`.
    Copying {
        /// The number of the copy.
        copy: usize,
        /// For each expert, the average number of selections per token and layer.
        mean_selections: Vec<f64>,
    },
}

/// The statistics of one layer's router for a micro-batch: selections of each expert, summed
/// probabilities, and summed squared log-sum-exps.
#[derive(Clone)]
struct LayerRouterStats {
    /// For each expert, the number of tokens for which the router selected the expert.
    selection_counts: Vec<u64>,
    /// For each expert, the sum of the router's probabilities over all tokens.
    prob_sums: Vec<f64>,
    /// The sum of the squared log-sum-exp of the router's logits over all tokens.
    lse_squares: f64,
}

impl RouterStats {
    /// Creates empty router statistics of `count` layers with experts, for micro-batches of `rows`
    /// tokens.
    pub fn new(shape: ExpertShape, coefficients: RouterLossCoefficients, count: usize, rows: usize) -> Self {
        let empty = LayerRouterStats {
            selection_counts: vec![0; shape.experts],
            prob_sums: vec![0.0; shape.experts],
            lse_squares: 0.0,
        };
        RouterStats {
            shape,
            coefficients,
            layers: vec![empty; count],
            rows,
            device_sums: Buf::default(),
            host_sums: Buf::default(),
            copied: Event::default(),
        }
    }

    /// Returns the number of sums in device memory from which the router losses of all layers are
    /// computed.
    fn count_device_sums(&self) -> usize {
        self.layers.len() * (self.shape.experts + 1)
    }

    /// Replaces the statistics of one mixture-of-experts layer by those of the current micro-batch,
    /// computed from the router's output `routing` and the experts that it selected. Does not wait
    /// for a device.
    pub fn record_layer(
        &mut self,
        ops: &dyn Ops,
        index: usize,
        routing: &RouterOutput,
        selected_experts: &[u32],
    ) {
        let t = &mut self.layers[index];
        t.selection_counts.fill(0);
        selected_experts.iter().for_each(|&e| t.selection_counts[e as usize] += 1);
        if !ops.is_host() {
            return self.sum_layer_on_device(ops, index, routing);
        }
        let t = &mut self.layers[index];
        let (probs, lse) = (routing.probs.view(), routing.lse.view());
        t.prob_sums.fill(0.0);
        for row in probs.host_slice().chunks_exact(self.shape.experts) {
            t.prob_sums.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p));
        }
        t.lse_squares = lse.host_slice().iter().map(|&l| f64::from(l) * f64::from(l)).sum();
    }

    /// Starts to sum, over all tokens on the device, the probabilities and squared log-sum-exps of
    /// one layer's router, from which the router losses are computed.
    fn sum_layer_on_device(&mut self, ops: &dyn Ops, index: usize, routing: &RouterOutput) {
        let (experts, sums) = (self.shape.experts, self.count_device_sums());
        if self.device_sums.len() < sums {
            self.device_sums = ops.zeroed(Dtype::F32, sums);
        }
        self.copied.make_stream_wait(); // a copy may still read the sums
        let at = index * (experts + 1);
        let (mut probs, mut squares) =
            self.device_sums.view_mut().slice(at..at + experts + 1).split_at(experts);
        ops.fill_with_zeros(probs.reborrow());
        ops.bias_backward(probs, routing.probs.view(), self.rows, experts);
        ops.dot_rows(squares.reborrow(), routing.lse.view(), routing.lse.view(), self.rows);
    }

    /// Starts to copy the statistics of all routers, from which a micro-batch's router losses are
    /// computed, from device to host memory. `copy` is the number of this copy within the step,
    /// below `capacity`. On the CPU, returns the router losses at once.
    pub fn start_loss_copy(&mut self, ops: &dyn Ops, copy: usize, capacity: usize) -> PendingRouterLoss {
        if ops.is_host() {
            return PendingRouterLoss::Known(self.compute_loss());
        }
        let sums = self.count_device_sums();
        if self.host_sums.len() < capacity * sums {
            self.host_sums = ops.alloc_staging(Dtype::F32, capacity * sums);
        }
        let to = self.host_sums.view_mut().slice(copy * sums..(copy + 1) * sums);
        self.copied = ops.copy_async(to, self.device_sums.view(), &[]);
        let mean_selections = self.mean_selections_by_expert().collect();
        PendingRouterLoss::Copying { copy, mean_selections }
    }

    /// Makes work that this thread enqueues on its GPU stream from now on wait for the running
    /// copies of router statistics to the host.
    pub fn make_stream_wait_for_copies(&self) {
        self.copied.make_stream_wait();
    }

    /// Waits until the router statistics of a micro-batch have been copied from the device, if
    /// necessary, and returns the sum of the router losses.
    pub fn finish_loss(&self, pending: &PendingRouterLoss) -> Result<f64, DeviceError> {
        let (copy, mean_selections) = match pending {
            PendingRouterLoss::Known(loss) => return Ok(*loss),
            PendingRouterLoss::Copying { copy, mean_selections } => (copy, mean_selections),
        };
        if !self.copied.is_reached() {
            self.copied.synchronize()?;
        }
        let sums = self.count_device_sums();
        let layers = self.host_sums.view().host_slice()[copy * sums..(copy + 1) * sums]
            .chunks_exact(self.shape.experts + 1);
        let column = |e: usize| layers.clone().map(|layer| f64::from(layer[e])).sum::<f64>();
        let prob_sums: Vec<f64> = (0..self.shape.experts).map(column).collect();
        Ok(self.compute_loss_from_sums(mean_selections, &prob_sums, column(self.shape.experts)))
    }

    /// Returns for each layer with experts how many tokens of the micro-batch selected each expert.
    pub fn selection_counts(&self) -> impl Iterator<Item = &[u64]> {
        self.layers.iter().map(|t| t.selection_counts.as_slice())
    }

    /// Returns for how many rows routers selected experts: the tokens of the micro-batch times the
    /// number of MoE layers.
    fn count_routed_rows(&self) -> f64 {
        (self.rows * self.layers.len()) as f64
    }

    /// Returns, for each expert number, how often routers selected the expert, divided by the
    /// number of tokens and of MoE layers. The sum over all experts is the number of experts per
    /// token.
    fn mean_selections_by_expert(&self) -> impl Iterator<Item = f64> {
        let selections = |e: usize| self.layers.iter().map(|t| t.selection_counts[e]).sum::<u64>() as f64;
        (0..self.shape.experts).map(move |e| selections(e) / self.count_routed_rows())
    }

    /// Computes the sum of the router losses (load-balancing loss and z-loss) of one micro-batch
    /// from statistics in host memory. Training adds this sum to the mean loss.
    fn compute_loss(&self) -> f64 {
        let prob_sum = |e: usize| self.layers.iter().map(|t| t.prob_sums[e]).sum::<f64>();
        let prob_sums: Vec<f64> = (0..self.shape.experts).map(prob_sum).collect();
        let selections: Vec<f64> = self.mean_selections_by_expert().collect();
        self.compute_loss_from_sums(&selections, &prob_sums, self.layers.iter().map(|t| t.lse_squares).sum())
    }

    /// Computes the sum of the weighted load-balancing loss and z-loss from three statistics, which
    /// are summed over all MoE layers and tokens. `mean_selections` are each expert's selections
    /// per token and MoE layer, `prob_sums` are each expert's summed probabilities, and `squares`
    /// is the sum of squared log-sum-exps.
    fn compute_loss_from_sums(&self, mean_selections: &[f64], prob_sums: &[f64], squares: f64) -> f64 {
        let mean_probs = prob_sums.iter().map(|sum| sum / self.count_routed_rows());
        let balance: f64 = mean_selections.iter().zip(mean_probs).map(|(share, mean)| share * mean).sum();
        self.coefficients.aux * self.shape.experts as f64 * balance
            + self.coefficients.z * squares / self.count_routed_rows()
    }

    /// Computes the gradient of the load-balancing loss with respect to a router's probabilities,
    /// and the factor of the squared log-sum-exps in the z-loss. The first is the gradient of
    /// `scale` × [`RouterStats::compute_loss`] with respect to the probabilities of a row, which is
    /// equal for all rows. The second is the factor of Σ lse² in the scaled loss.
    pub fn compute_loss_gradient(&self, scale: f64) -> (Vec<f32>, f32) {
        let factor = scale * self.coefficients.aux * self.shape.experts as f64 / self.count_routed_rows();
        let balance = self.mean_selections_by_expert().map(|share| (factor * share) as f32).collect();
        (balance, (scale * self.coefficients.z / self.count_routed_rows()) as f32)
    }
}

/// Returns the factors of the router losses that `train.experts` specifies. `model_aux` is the
/// coefficient of the load-balancing loss if `train.experts` does not set one.
pub(super) fn select_router_loss_coefficients(spec: &ExpertsSpec, model_aux: f64) -> RouterLossCoefficients {
    RouterLossCoefficients { aux: spec.aux_loss.unwrap_or(model_aux), z: spec.z_loss }
}
