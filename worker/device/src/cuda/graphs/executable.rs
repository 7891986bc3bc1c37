//! A CUDA graph made from a batch of recorded GPU calls, which is launched as a whole
//! ([`ExecutableGraph`]).
use super::super::bindings::driver_sys::{CUgraph, CUgraphExec, CUgraphNode, CUstreamCaptureMode};
use super::super::context::GpuContext;
use super::super::error::Result;
use super::call_batch::CallBatch;
use std::ptr;

/// A CUDA graph, made from a batch of recorded GPU calls, that is ready to be launched. It must be
/// released with [`ExecutableGraph::destroy`].
pub(super) struct ExecutableGraph {
    executable: CUgraphExec,
    /// The captured graph, to which the nodes belong.
    source: CUgraph,
    /// The node of each call; null if the call is no kernel or its node is unknown.
    nodes: Vec<CUgraphNode>,
}

impl ExecutableGraph {
    /// Captures the recorded GPU calls of `batch` as a CUDA graph, without executing them.
    pub(super) fn capture(gpu: &GpuContext, batch: &CallBatch) -> Result<ExecutableGraph> {
        let driver = gpu.driver_graphs()?;
        // In relaxed mode a library may load a kernel at its first call.
        // SAFETY: the stream lives, and no other thread uses it until the capture ends.
        unsafe {
            driver
                .cuStreamBeginCapture_v2(gpu.main_stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        }?;
        let mut nodes = Vec::with_capacity(batch.len());
        let node = |is_kernel: bool| if is_kernel { get_last_captured_node(gpu) } else { ptr::null_mut() };
        let issued = batch.issue_all_with_callback(gpu, |is_kernel| nodes.push(node(is_kernel)));
        let mut graph = ExecutableGraph { executable: ptr::null_mut(), source: ptr::null_mut(), nodes };
        // SAFETY: the stream is capturing; writes one handle, which is null after an error.
        let ended = unsafe { driver.cuStreamEndCapture(gpu.main_stream, &mut graph.source) };
        let instantiated = issued.and(ended).and_then(|()| {
            // SAFETY: the graph was just captured; writes one handle.
            unsafe { driver.cuGraphInstantiateWithFlags(&mut graph.executable, graph.source, 0) }
                .map_err(|error| error.with_failed_function("cuGraphInstantiate"))
        });
        match instantiated {
            Ok(()) => Ok(graph),
            Err(error) => {
                graph.destroy(gpu);
                Err(error)
            }
        }
    }

    /// Launches the CUDA graph on the main stream, which executes all its calls in order.
    pub(super) fn launch(&self, gpu: &GpuContext) -> Result<()> {
        // SAFETY: graph and stream live. The batch's memory is allocated, as its calls would need.
        unsafe { gpu.driver_graphs()?.cuGraphLaunch(self.executable, gpu.main_stream) }
    }

    /// Returns true if the driver has reported a graph node for each recorded call whose index is
    /// in `calls`, so that these calls can be updated.
    pub(super) fn has_nodes_of_calls(&self, calls: &[usize]) -> bool {
        calls.iter().all(|call| self.nodes.get(*call).is_some_and(|node| !node.is_null()))
    }

    /// Replaces kernel launches in the CUDA graph by the launches with equal indices in `batch`,
    /// for all later launches of the graph.
    pub(super) fn update_kernels(&self, gpu: &GpuContext, batch: &CallBatch, calls: &[usize]) -> Result<()> {
        let driver = gpu.driver_graphs()?;
        for call in calls {
            // SAFETY: a node of the source graph, which lives; the driver copies the arguments.
            let update = |kernel: &_| unsafe {
                driver.cuGraphExecKernelNodeSetParams_v2(self.executable, self.nodes[*call], kernel)
            };
            batch.with_kernel_node_params(*call, update).unwrap_or(Ok(()))?;
        }
        Ok(())
    }

    /// Releases the CUDA graph in the driver. A launch that is in progress completes.
    pub(super) fn destroy(&self, gpu: &GpuContext) {
        let Ok(driver) = gpu.driver_graphs() else { return };
        // SAFETY: created by the driver, destroyed once. Errors cannot be handled here.
        unsafe {
            if !self.executable.is_null() {
                let _ = (driver.cuGraphExecDestroy)(self.executable);
            }
            if !self.source.is_null() {
                let _ = (driver.cuGraphDestroy)(self.source);
            }
        }
    }
}

/// Returns the CUDA graph node of the latest call on the main stream while the stream is being
/// captured. Returns null if the driver does not report it.
fn get_last_captured_node(gpu: &GpuContext) -> CUgraphNode {
    gpu.capture_info.as_ref().map_or(ptr::null_mut(), |info| info.query_last_node(gpu.main_stream))
}
