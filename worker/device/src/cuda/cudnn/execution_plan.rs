//! [`ExecutionPlan`]: a graph of operations that cuDNN has compiled for a GPU, and its execution.
use super::super::bindings::{Address, Handle};
use super::super::error::{CudaError, Result};
use super::descriptor::{Attribute as A, Descriptor, DescriptorType};
use super::library::{Cudnn, check_status};
use super::operation_graph::OperationGraph;
use std::{ffi::c_void, ptr, sync::Arc};

/// Status codes of requests that cuDNN does not support: `CUDNN_STATUS_NOT_SUPPORTED` and its
/// sub-codes.
const NOT_SUPPORTED: std::ops::Range<i32> = 3000..4000;

/// The GPU for which an execution plan is compiled.
pub(super) enum PlanTarget {
    /// The GPU to which this cuDNN handle belongs.
    Handle(Handle),
    /// A GPU that is only known by its properties.
    Properties(Descriptor),
}

/// A graph of operations that cuDNN has compiled for one GPU.
pub(super) struct ExecutionPlan {
    plan: Descriptor,
    /// Size in bytes of the workspace that the plan needs in GPU memory.
    pub(super) workspace: usize,
    /// The id and value of each scalar that the graph reads from host memory.
    scalars: Vec<(i64, Box<f32>)>,
    _config: Descriptor,
    _source: Arc<PlanSource>,
}

/// Descriptors from which plans are created. cuDNN may read them as long as the plans live.
struct PlanSource {
    _graph_descriptor: Descriptor,
    graph: OperationGraph,
}

/// Returns cuDNN's execution plans for a graph, the library's best guess first. There are none if
/// cuDNN does not support the graph. Each plan is compiled when the iterator reaches it.
pub(super) fn create_graph_plans(
    graph: OperationGraph,
    scalars: Vec<(i64, f32)>,
    target: PlanTarget,
) -> Result<impl Iterator<Item = Result<ExecutionPlan>>> {
    let (source, configs) = match ok_if_supported(query_engine_configs(&graph, &target))? {
        Some((descriptor, configs)) => {
            (Some(Arc::new(PlanSource { _graph_descriptor: descriptor, graph })), configs)
        }
        None => (None, Vec::new()),
    };
    let compile =
        move |config| ok_if_supported(compile_plan(source.as_ref()?, config, &scalars, &target)).transpose();
    Ok(configs.into_iter().filter_map(compile))
}

/// Converts the error of a request that cuDNN does not support to `None`. Fails with any other
/// error.
fn ok_if_supported<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(CudaError::Call { status, .. }) if NOT_SUPPORTED.contains(&status) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the descriptor of the whole operation graph, and the engine configurations that cuDNN's
/// heuristics suggest.
fn query_engine_configs(
    graph: &OperationGraph,
    target: &PlanTarget,
) -> Result<(Descriptor, Vec<Descriptor>)> {
    let library = &graph.library;
    let mut descriptor = Descriptor::new(library, DescriptorType::Graph)?
        .set_descriptors(A::GraphOperations, &graph.operations)?;
    if let PlanTarget::Handle(handle) = target {
        descriptor = descriptor.set_handle(A::GraphHandle, *handle)?;
    }
    let descriptor = descriptor.finalize(DescriptorType::Graph)?;
    let mut heuristics = Descriptor::new(library, DescriptorType::Heuristics)?
        .set_descriptor(A::HeuristicsGraph, &descriptor)?
        .set_heuristic_mode_a()?;
    if let PlanTarget::Properties(properties) = target {
        heuristics = heuristics.set_descriptor(A::HeuristicsProperties, properties)?;
    }
    let configs = heuristics.finalize(DescriptorType::Heuristics)?.query_engine_configs()?;
    Ok((descriptor, configs))
}

/// Compiles the execution plan of an engine configuration.
fn compile_plan(
    source: &Arc<PlanSource>,
    config: Descriptor,
    scalars: &[(i64, f32)],
    target: &PlanTarget,
) -> Result<ExecutionPlan> {
    let plan = Descriptor::new(&source.graph.library, DescriptorType::Plan)?
        .set_descriptor(A::PlanConfig, &config)?;
    let plan = match target {
        PlanTarget::Handle(handle) => plan.set_handle(A::PlanHandle, *handle)?,
        PlanTarget::Properties(properties) => plan.set_descriptor(A::PlanProperties, properties)?,
    };
    let plan = plan.finalize(DescriptorType::Plan)?;
    let workspace = usize::try_from(plan.query_int(A::PlanWorkspace)?).unwrap_or(0);
    let scalars = scalars.iter().map(|(id, value)| (*id, Box::new(*value))).collect();
    Ok(ExecutionPlan { plan, workspace, scalars, _config: config, _source: source.clone() })
}

/// An execution plan with the addresses of its tensors and its workspace for one execution.
#[derive(Clone)]
pub(in super::super) struct PreparedPlan {
    pub(super) cudnn: Arc<Cudnn>,
    pub(super) plan: Arc<ExecutionPlan>,
    /// The id and address of each tensor.
    pub(super) tensors: Vec<(i64, Address)>,
    pub(super) workspace: Address,
}

impl PartialEq for PreparedPlan {
    fn eq(&self, other: &Self) -> bool {
        self.tensors == other.tensors
            && self.workspace == other.workspace
            && Arc::ptr_eq(&self.plan, &other.plan)
    }
}

impl PreparedPlan {
    /// Issues the plan with its addresses to a stream immediately.
    pub(in super::super) fn issue(&self, stream: Handle) -> Result<()> {
        let on_device = |(id, at): &(i64, Address)| (*id, ptr::without_provenance(*at as usize));
        let on_host = |(id, value): &(i64, Box<f32>)| (*id, ptr::from_ref(&**value).cast::<c_void>());
        let bindings = self.tensors.iter().map(on_device).chain(self.plan.scalars.iter().map(on_host));
        let (ids, pointers): (Vec<i64>, Vec<*const c_void>) = bindings.unzip();
        let variant_pack = Descriptor::new(&self.cudnn.library, DescriptorType::VariantPack)?
            .set_ints(A::PackIds, &ids)?
            .set_pointers(A::PackPointers, &pointers)?
            .set_pointers(A::PackWorkspace, &[ptr::without_provenance(self.workspace as usize)])?
            .finalize(DescriptorType::VariantPack)?;
        let library = &self.cudnn.library;
        self.cudnn.with_handle(|handle| {
            // SAFETY: handle and stream live.
            check_status(library, "cudnnSetStream", unsafe { (library.cudnnSetStream)(handle, stream) })?;
            // SAFETY: plan and pack are finalized. The ops checked that the operands are as large
            // as the plan's tensors.
            let status = unsafe {
                (library.cudnnBackendExecute)(handle, self.plan.plan.handle(), variant_pack.handle())
            };
            check_status(library, "cudnnBackendExecute", status)
        })
    }

    /// Returns words for hashing that differ between most pairs of different plans or addresses.
    pub(in super::super) fn hash_words(&self) -> impl Iterator<Item = u64> {
        let plan = Arc::as_ptr(&self.plan).addr() as u64;
        self.tensors.iter().map(|(_, at)| *at).chain([self.workspace, plan])
    }
}
