//! Compiles a graph of operations with cuDNN for a GPU, and executes it ([`ExecutionPlan`]).
use super::super::bindings::cudnn_sys::{
    cudnnBackendAttributeName_t::*, cudnnBackendDescriptorType_t::*, cudnnBackendHeurMode_t, cudnnHandle_t,
};
use super::super::bindings::{Address, driver_sys::CUstream};
use super::super::error::{CudaError, Result};
use super::descriptor::Descriptor;
use super::library::Cudnn;
use super::operation_graph::OperationGraph;
use std::{ffi::c_void, ptr, sync::Arc};

/// Status codes with which cuDNN rejects unsupported requests: `CUDNN_STATUS_NOT_SUPPORTED` and its
/// sub-codes.
const NOT_SUPPORTED_STATUSES: std::ops::Range<i32> = 3000..4000;

/// The GPU for which cuDNN compiles an execution plan: a GPU of this machine, or a GPU model that
/// is only known by its properties.
pub(super) enum PlanTarget {
    /// The GPU to which this cuDNN handle belongs.
    Handle(cudnnHandle_t),
    /// A GPU that is only known by its properties.
    Properties(Descriptor),
}

/// An execution plan: a graph of operations that cuDNN has compiled for one GPU.
pub(super) struct ExecutionPlan {
    plan: Descriptor,
    /// Size in bytes of the workspace that the plan needs in GPU memory.
    pub(super) workspace: usize,
    /// The id and value of each scalar that the graph reads from host memory.
    scalars: Vec<(i64, Box<f32>)>,
    _config: Descriptor,
    _source: Arc<PlanDescriptors>,
}

/// The cuDNN objects (descriptors) from which execution plans were created; cuDNN requires that
/// they exist as long as the plans.
struct PlanDescriptors {
    _graph_descriptor: Descriptor,
    graph: OperationGraph,
}

/// Returns an iterator over cuDNN's execution plans for a graph of operations, the presumably
/// fastest plan first. It is empty if cuDNN does not support the graph. Each plan is compiled when
/// the iterator reaches it.
pub(super) fn create_graph_plans(
    graph: OperationGraph,
    scalars: Vec<(i64, f32)>,
    target: PlanTarget,
) -> Result<impl Iterator<Item = Result<ExecutionPlan>>> {
    let (source, configs) = match ok_if_supported(query_engine_configs(&graph, &target))? {
        Some((descriptor, configs)) => {
            (Some(Arc::new(PlanDescriptors { _graph_descriptor: descriptor, graph })), configs)
        }
        None => (None, Vec::new()),
    };
    let compile =
        move |config| ok_if_supported(compile_plan(source.as_ref()?, config, &scalars, &target)).transpose();
    Ok(configs.into_iter().filter_map(compile))
}

/// Turns cuDNN's error "not supported" into `None`, and returns other results unchanged. Fails with
/// any other error.
fn ok_if_supported<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(CudaError::Call { status, .. }) if NOT_SUPPORTED_STATUSES.contains(&status) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Asks cuDNN for ways to compute a graph of operations (engine configurations), and returns them
/// with cuDNN's object for that graph.
fn query_engine_configs(
    graph: &OperationGraph,
    target: &PlanTarget,
) -> Result<(Descriptor, Vec<Descriptor>)> {
    let library = &graph.library;
    let operations: Vec<_> = graph.operations.iter().map(Descriptor::handle).collect();
    let mut descriptor = Descriptor::new(library, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
        .set_attribute(CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
    if let PlanTarget::Handle(handle) = target {
        descriptor = descriptor.set_attribute(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[*handle])?;
    }
    let descriptor = descriptor.finalize()?;
    let mut heuristics = Descriptor::new(library, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
        .set_attribute(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[descriptor.handle()])?
        .set_attribute(CUDNN_ATTR_ENGINEHEUR_MODE, &[cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A])?;
    if let PlanTarget::Properties(properties) = target {
        heuristics = heuristics.set_attribute(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &[properties.handle()])?;
    }
    let configs = heuristics.finalize()?.query_engine_configs()?;
    Ok((descriptor, configs))
}

/// Compiles the execution plan for `config`, one of the ways to compute a graph of operations that
/// cuDNN suggested.
fn compile_plan(
    source: &Arc<PlanDescriptors>,
    config: Descriptor,
    scalars: &[(i64, f32)],
    target: &PlanTarget,
) -> Result<ExecutionPlan> {
    let plan = Descriptor::new(&source.graph.library, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
        .set_attribute(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config.handle()])?;
    let plan = match target {
        PlanTarget::Handle(handle) => plan.set_attribute(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[*handle])?,
        PlanTarget::Properties(properties) => {
            plan.set_attribute(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &[properties.handle()])?
        }
    };
    let plan = plan.finalize()?;
    let workspace =
        usize::try_from(plan.query_int_attribute(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?).unwrap_or(0);
    let scalars = scalars.iter().map(|(id, value)| (*id, Box::new(*value))).collect();
    Ok(ExecutionPlan { plan, workspace, scalars, _config: config, _source: source.clone() })
}

/// One execution of a cuDNN plan: the plan, the GPU addresses of its tensors, and its workspace.
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
    /// Issues this execution of a cuDNN plan to `stream` immediately, without recording it for a
    /// CUDA graph.
    pub(in super::super) fn issue(&self, stream: CUstream) -> Result<()> {
        let on_device = |(id, at): &(i64, Address)| (*id, ptr::without_provenance(*at as usize));
        let on_host = |(id, value): &(i64, Box<f32>)| (*id, ptr::from_ref(&**value).cast::<c_void>());
        let bindings = self.tensors.iter().map(on_device).chain(self.plan.scalars.iter().map(on_host));
        let (ids, pointers): (Vec<i64>, Vec<*const c_void>) = bindings.unzip();
        let variant_pack = Descriptor::new(&self.cudnn.library, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .set_attribute(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?
            .set_attribute(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?
            .set_attribute(
                CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
                &[ptr::without_provenance(self.workspace as usize)],
            )?
            .finalize()?;
        let library = &self.cudnn.library;
        self.cudnn.with_handle(|handle| {
            // SAFETY: handle and stream live, and plan and pack are finalized. The ops checked that
            // the operands are as large as the plan's tensors.
            unsafe {
                library.cudnnSetStream(handle, stream.cast())?;
                library.cudnnBackendExecute(handle, self.plan.plan.handle(), variant_pack.handle())
            }
        })
    }

    /// Returns numbers that identify the plan and the addresses of its tensors; their hash serves
    /// to recognize repeated sequences of GPU calls. The words of different plans may be equal, but
    /// rarely are.
    pub(in super::super) fn list_words_to_hash(&self) -> impl Iterator<Item = u64> {
        let plan = Arc::as_ptr(&self.plan).addr() as u64;
        self.tensors.iter().map(|(_, at)| *at).chain([self.workspace, plan])
    }
}
