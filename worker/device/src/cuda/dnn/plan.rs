//! Plans: what cuDNN compiles of a graph, and how one is run.
use super::super::binding::{Address, Handle};
use super::super::error::{CudaError, Result};
use super::Dnn;
use super::descriptor::{Attribute as A, Descriptor, Kind};
use super::graph::Graph;
use std::{ffi::c_void, ptr, sync::Arc};

/// CUDNN_STATUS_NOT_SUPPORTED and its kin.
const NOT_SUPPORTED: std::ops::Range<i32> = 3000..4000;

/// What plans are made for.
pub(super) enum Target {
    /// The card of a handle of the library.
    Card(Handle),
    /// A card of which this is known.
    Properties(Descriptor),
}

/// A way to do a graph's work.
pub(super) struct Plan {
    plan: Descriptor,
    /// Of bytes.
    pub(super) workspace: usize,
    /// The `f32` of the host that the graph reads, by their tensors' numbers.
    values: Vec<(i64, Box<f32>)>,
    _config: Descriptor,
    _source: Arc<Source>,
}

/// What plans were made of: the library may look at it as long as they live.
struct Source {
    _whole: Descriptor,
    graph: Graph,
}

/// The plans for a graph, the library's best guess first, each made when it is asked for; none where it can't do it.
pub(super) fn plans(
    graph: Graph,
    values: Vec<(i64, f32)>,
    target: Target,
) -> Result<impl Iterator<Item = Result<Plan>>> {
    let (source, configs) = match supported(configs(&graph, &target))? {
        Some((whole, configs)) => (Some(Arc::new(Source { _whole: whole, graph })), configs),
        None => (None, Vec::new()),
    };
    let made = move |config| supported(plan(source.as_ref()?, config, &values, &target)).transpose();
    Ok(configs.into_iter().filter_map(made))
}

/// None where the library says that it can't.
fn supported<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(CudaError::Call { code, .. }) if NOT_SUPPORTED.contains(&code) => Ok(None),
        Err(error) => Err(error),
    }
}

fn configs(graph: &Graph, target: &Target) -> Result<(Descriptor, Vec<Descriptor>)> {
    let library = &graph.library;
    let mut whole = Descriptor::new(library, Kind::Graph)?.parts(A::GraphOperations, &graph.operations)?;
    if let Target::Card(handle) = target {
        whole = whole.owner(A::GraphHandle, *handle)?;
    }
    let whole = whole.finish(Kind::Graph)?;
    let mut heuristics =
        Descriptor::new(library, Kind::Heuristics)?.part(A::HeuristicsGraph, &whole)?.best_guesses()?;
    if let Target::Properties(properties) = target {
        heuristics = heuristics.part(A::HeuristicsProperties, properties)?;
    }
    let found = heuristics.finish(Kind::Heuristics)?.results()?;
    Ok((whole, found))
}

fn plan(source: &Arc<Source>, config: Descriptor, values: &[(i64, f32)], target: &Target) -> Result<Plan> {
    let plan = Descriptor::new(&source.graph.library, Kind::Plan)?.part(A::PlanConfig, &config)?;
    let plan = match target {
        Target::Card(handle) => plan.owner(A::PlanHandle, *handle)?,
        Target::Properties(properties) => plan.part(A::PlanProperties, properties)?,
    };
    let plan = plan.finish(Kind::Plan)?;
    let workspace = usize::try_from(plan.number(A::PlanWorkspace)?).unwrap_or(0);
    let values = values.iter().map(|(id, value)| (*id, Box::new(*value))).collect();
    Ok(Plan { plan, workspace, values, _config: config, _source: source.clone() })
}

impl Plan {
    pub(super) fn handle(&self) -> Handle {
        self.plan.handle()
    }
}

/// A plan with everything that it is run with.
#[derive(Clone)]
pub(in super::super) struct Asked {
    pub(super) dnn: Arc<Dnn>,
    pub(super) plan: Arc<Plan>,
    /// Where tensors lie, by their numbers.
    pub(super) tensors: Vec<(i64, Address)>,
    pub(super) workspace: Address,
}

impl PartialEq for Asked {
    fn eq(&self, other: &Self) -> bool {
        self.tensors == other.tensors
            && self.workspace == other.workspace
            && Arc::ptr_eq(&self.plan, &other.plan)
    }
}

impl Asked {
    /// Puts it on a stream.
    pub(in super::super) fn issue(&self, stream: Handle) -> Result<()> {
        let of_card = |(id, at): &(i64, Address)| (*id, ptr::without_provenance(*at as usize));
        let of_host = |(id, value): &(i64, Box<f32>)| (*id, ptr::from_ref(&**value).cast::<c_void>());
        let all = self.tensors.iter().map(of_card).chain(self.plan.values.iter().map(of_host));
        let (ids, pointers): (Vec<i64>, Vec<*const c_void>) = all.unzip();
        let pack = Descriptor::new(&self.dnn.library, Kind::VariantPack)?
            .numbers(A::PackIds, &ids)?
            .pointers(A::PackPointers, &pointers)?
            .pointers(A::PackWorkspace, &[ptr::without_provenance(self.workspace as usize)])?
            .finish(Kind::VariantPack)?;
        self.dnn.run(&self.plan, &pack, stream)
    }

    /// What tells it from most others.
    pub(in super::super) fn numbers(&self) -> impl Iterator<Item = u64> {
        let plan = Arc::as_ptr(&self.plan).addr() as u64;
        self.tensors.iter().map(|(_, at)| *at).chain([self.workspace, plan])
    }
}
