//! A piece as a graph of the driver's.
use super::super::binding::{Handle, RELAXED};
use super::super::card::Card;
use super::super::error::Result;
use super::piece::Piece;
use std::ptr;

/// Ready to be launched; [`Graph::destroy`] gives it back.
pub(super) struct Graph {
    ready: Handle,
    /// What it was made of. Nodes are this one's.
    source: Handle,
    /// The node of each call that is a kernel; null where it isn't known.
    nodes: Vec<Handle>,
}

impl Graph {
    /// Of a piece, of which nothing is done.
    pub(super) fn of(card: &Card, piece: &Piece) -> Result<Graph> {
        let driver = &card.driver;
        // What libraries do of their own at their first call (load a kernel) is no reason to fail.
        // SAFETY: the stream lives; nobody else asks it for anything until the capture ends.
        let code = unsafe { (driver.cuStreamBeginCapture_v2)(card.stream, RELAXED) };
        driver.check("cuStreamBeginCapture", code)?;
        let mut nodes = Vec::with_capacity(piece.len());
        let last = |kernel: bool| if kernel { last_node(card) } else { ptr::null_mut() };
        let issued = piece.each(card, |kernel| nodes.push(last(kernel)));
        let mut graph = Graph { ready: ptr::null_mut(), source: ptr::null_mut(), nodes };
        // SAFETY: the stream is capturing; one handle is written. After an error it is null.
        let code = unsafe { (driver.cuStreamEndCapture)(card.stream, &mut graph.source) };
        let made = issued.and_then(|()| driver.check("cuStreamEndCapture", code)).and_then(|()| {
            // SAFETY: the graph was just made; one handle is written.
            let code = unsafe { (driver.cuGraphInstantiateWithFlags)(&mut graph.ready, graph.source, 0) };
            driver.check("cuGraphInstantiate", code)
        });
        match made {
            Ok(()) => Ok(graph),
            Err(error) => {
                graph.destroy(card);
                Err(error)
            }
        }
    }

    /// Puts it on the card's stream.
    pub(super) fn launch(&self, card: &Card) -> Result<()> {
        // SAFETY: graph and stream live; the memory that the piece was asked for with is there, as it would have to be for
        // the calls.
        let code = unsafe { (card.driver.cuGraphLaunch)(self.ready, card.stream) };
        card.driver.check("cuGraphLaunch", code)
    }

    /// Are the nodes of these calls known?
    pub(super) fn knows(&self, calls: &[usize]) -> bool {
        calls.iter().all(|call| self.nodes.get(*call).is_some_and(|node| !node.is_null()))
    }

    /// From its next launch on these calls are kernels as `piece` has them.
    pub(super) fn change(&self, card: &Card, piece: &Piece, calls: &[usize]) -> Result<()> {
        for call in calls {
            // SAFETY: a node of the graph that this one was made of, which lives; the driver copies the arguments.
            let change = |kernel: &_| unsafe {
                (card.driver.cuGraphExecKernelNodeSetParams_v2)(self.ready, self.nodes[*call], kernel)
            };
            let code = piece.with_kernel(*call, change).unwrap_or(0);
            card.driver.check("cuGraphExecKernelNodeSetParams", code)?;
        }
        Ok(())
    }

    /// Gives it back. A launch that is under way ends all the same.
    pub(super) fn destroy(&self, card: &Card) {
        // SAFETY: made by the driver, destroyed once; nothing can be done about an error.
        unsafe {
            if !self.ready.is_null() {
                let _ = (card.driver.cuGraphExecDestroy)(self.ready);
            }
            if !self.source.is_null() {
                let _ = (card.driver.cuGraphDestroy)(self.source);
            }
        }
    }
}

/// What was captured last; null where the driver doesn't say.
fn last_node(card: &Card) -> Handle {
    let (mut status, mut id, mut graph) = (0, 0, ptr::null_mut());
    let (mut nodes, mut count) = (ptr::null(), 0);
    // SAFETY: all are written; the nodes are the driver's, up to the next call for the stream.
    unsafe {
        let code = (card.driver.cuStreamGetCaptureInfo_v2)(
            card.stream,
            &mut status,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut count,
        );
        if code == 0 && count == 1 && !nodes.is_null() { *nodes } else { ptr::null_mut() }
    }
}
