//! [`MoeTrainer`]: the placement of experts, saved activations and buffers with which a trainer
//! trains mixture-of-experts layers.
pub(super) mod layer_plan;
mod passes;

use super::dispatch::TokenDispatcher;
use crate::{
    expert_layout::{ExpertLayout, RecvPlan, SendPlan},
    model::{
        Model, MoeModel,
        moe::{ExpertShape, PendingRouterLoss, RouterOutput, RouterStats},
    },
    zero::engine::ZeroEngine,
};
use device::{Buf, Dtype, Ops};
use jobspec::{RecomputeMode, TrainSpec};
use layer_plan::{MoeLayerPlan, plan_moe_layers};
use std::sync::Arc;

/// What a trainer needs to train mixture-of-experts layers: the placement of experts, saved
/// activations, and the exchange of token rows between ranks.
pub struct MoeTrainer {
    shape: ExpertShape,
    /// The plan of each layer, or `None` for a dense layer.
    layers: Vec<Option<MoeLayerPlan>>,
    /// The router statistics of this rank's micro-batch.
    router_stats: RouterStats,
    /// The saved activations of each MoE layer. With recomputation, all layers share one set.
    saved: Vec<SavedMoeActivations>,
    /// The routes of each MoE layer for the current micro-batch, also with recomputation.
    routes: Vec<LayerRoutes>,
    workspace: MoeScratchBuffers,
    dispatcher: TokenDispatcher,
}

/// The activations that the forward pass of a mixture-of-experts layer saves for its backward pass.
struct SavedMoeActivations {
    routing: RouterOutput,
    /// The inputs of this rank's experts, one row for each received token, sorted by expert.
    rows: Buf,
    gate_up: Buf,
}

/// The experts that one layer's router has selected for a micro-batch, and the token rows that this
/// rank therefore sends and receives. They are in host memory.
struct LayerRoutes {
    /// The selected experts of each token, `[rows, per_token]`, by descending probability.
    selected_experts: Vec<u32>,
    send_plan: SendPlan,
    recv_plan: RecvPlan,
}

/// What the forward and backward pass of one mixture-of-experts layer use.
struct MoeLayerParts<'a> {
    layer: MoeLayerPlan,
    saved: &'a mut SavedMoeActivations,
    routes: &'a mut LayerRoutes,
    workspace: &'a mut MoeScratchBuffers,
    dispatcher: &'a mut TokenDispatcher,
    stats: &'a mut RouterStats,
}

/// Temporary buffers that all mixture-of-experts layers share, and that grow when the routers send
/// more rows to this rank.
struct MoeScratchBuffers {
    /// In the forward pass, the outputs of this rank's experts. In the backward pass, the gradients
    /// of the layer's output for the tokens of these rows.
    out: Buf,
    /// The gradients of the inputs of this rank's experts.
    drows: Buf,
    act: Buf,
    dact: Buf,
    dgate_up: Buf,
    /// For each row of this rank's experts, the factor by which the router multiplies the expert's
    /// output. This buffer, `dweights` and `choices` are `f32` in every precision.
    weights: Buf,
    dweights: Buf,
    /// The gradients of the router's factors for the tokens of this rank: token by token, and for
    /// each token in the order of its selected experts.
    choices: Buf,
}

impl MoeScratchBuffers {
    /// Creates empty scratch buffers for rows with elements of type `dtype`.
    fn new(ops: &dyn Ops, dtype: Dtype) -> Self {
        let rows = || ops.zeroed(dtype, 0);
        MoeScratchBuffers {
            out: rows(),
            drows: rows(),
            act: rows(),
            dact: rows(),
            dgate_up: rows(),
            weights: ops.zeroed(Dtype::F32, 0),
            dweights: ops.zeroed(Dtype::F32, 0),
            choices: ops.zeroed(Dtype::F32, 0),
        }
    }
}

impl MoeTrainer {
    /// Creates the expert assignment and the buffers for training the mixture-of-experts layers of
    /// `model` with micro-batches of `rows` tokens. Returns `None` for a dense model.
    pub fn new(
        ops: &Arc<dyn Ops>,
        model: &Model,
        placement: Option<&ExpertLayout>,
        engine: &ZeroEngine,
        rows: usize,
        recompute: RecomputeMode,
    ) -> Option<Self> {
        let (moe, placement) = (MoeModel::from_model(model)?, placement?);
        let (shape, rank, dtype) = (moe.expert_shape(), engine.rank(), engine.param_dtypes().compute);
        let layers = plan_moe_layers(model, moe, placement, rank % placement.parallel);
        let (count, coefficients) = (moe.list_moe_layers().count(), moe.router_loss_coefficients());
        let saved = || SavedMoeActivations {
            routing: RouterOutput::new(ops.as_ref(), shape, rows),
            rows: ops.zeroed(dtype, 0),
            gate_up: ops.zeroed(dtype, 0),
        };
        let routes = || LayerRoutes {
            selected_experts: vec![0; rows * shape.per_token],
            send_plan: SendPlan::default(),
            recv_plan: RecvPlan::default(),
        };
        let group = placement.list_group_ranks(rank);
        let dispatcher =
            TokenDispatcher::new(ops.clone(), engine, group, rows * shape.per_token, shape.hidden);
        Some(MoeTrainer {
            shape,
            router_stats: RouterStats::new(shape, coefficients, count, rows),
            layers,
            saved: (0..count_saved_activation_sets(count, recompute)).map(|_| saved()).collect(),
            routes: (0..count).map(|_| routes()).collect(),
            workspace: MoeScratchBuffers::new(ops.as_ref(), dtype),
            dispatcher,
        })
    }

    /// Returns the index of the parameter unit (tensors that are gathered together) with this
    /// rank's experts of layer number `l`, or `None` for a layer without experts.
    pub fn find_expert_unit(&self, l: usize) -> Option<usize> {
        self.layers[l].as_ref().map(|layer| layer.unit)
    }

    /// Returns the statistics of all layers' routers for the last micro-batch, such as how many
    /// tokens selected each expert.
    pub(super) fn router_stats(&self) -> &RouterStats {
        &self.router_stats
    }

    /// Starts to copy the sums that determine this micro-batch's router losses from the device to
    /// the host. `copy` is the number of this copy within the step, below `capacity`.
    pub(super) fn start_router_loss_copy(
        &mut self,
        ops: &dyn Ops,
        copy: usize,
        capacity: usize,
    ) -> PendingRouterLoss {
        self.router_stats.start_loss_copy(ops, copy, capacity)
    }

    /// Returns for each mixture-of-experts layer how often the routers selected each expert in the
    /// most recent micro-batch of this rank.
    pub fn expert_selection_counts(&self) -> Vec<Vec<u64>> {
        self.router_stats.selection_counts().map(<[u64]>::to_vec).collect()
    }

    /// Returns what the forward and backward pass of mixture-of-experts layer number `l` use: the
    /// placement of experts, saved activations and shared buffers. Panics if the layer has no
    /// experts.
    fn borrow_for_layer(&mut self, l: usize) -> MoeLayerParts<'_> {
        let layer = self.layers[l].clone().expect("a layer with experts");
        let set = layer.index.min(self.saved.len() - 1);
        MoeLayerParts {
            saved: &mut self.saved[set],
            routes: &mut self.routes[layer.index],
            layer,
            workspace: &mut self.workspace,
            dispatcher: &mut self.dispatcher,
            stats: &mut self.router_stats,
        }
    }
}

/// Returns how many of the model's mixture-of-experts layers have saved activations in memory at
/// one time: all of them, or at most one with recomputation.
fn count_saved_activation_sets(count: usize, recompute: RecomputeMode) -> usize {
    if recompute == RecomputeMode::None { count } else { count.min(1) }
}

/// Computes the size in bytes of the buffers for training mixture-of-experts layers, for the memory
/// estimate.
///
/// `dtype` is the element type of activations, and `on_host` states whether the buffers are in host
/// memory, as the routes of tokens always are. Routers may send all tokens of a group to the
/// experts of one rank. The estimate assumes that a rank receives one and a half times its even
/// share, which untrained routers typically send.
pub fn count_moe_buffer_bytes(model: &Model, train: &TrainSpec, dtype: Dtype, on_host: bool) -> usize {
    let Some(moe) = MoeModel::from_model(model) else { return 0 };
    let (s, parallel) = (moe.expert_shape(), train.experts.expert_parallel_size);
    let rows = train.batch.micro as usize * train.data.seq_len as usize;
    let layers = moe.list_moe_layers().count();
    let sets = count_saved_activation_sets(layers, train.recompute);
    let sent = rows * s.per_token;
    let came = if parallel > 1 { sent + sent / 2 } else { sent };
    let routes = if on_host { 4 * 4 * sent } else { 0 };
    let kept = 4 * RouterOutput::count_output_elements(s, rows)
        + came * (s.hidden + 2 * s.intermediate) * dtype.size();
    let workspace = came * ((2 * s.hidden + 4 * s.intermediate) * dtype.size() + 4 * 2) + 4 * 2 * sent;
    // exchanges between ranks need two more buffers for rows and weights
    let exchange = if parallel > 1 { (sent + came) * (s.hidden * dtype.size() + 4) } else { 0 };
    layers * routes + sets * kept + workspace + exchange
}
