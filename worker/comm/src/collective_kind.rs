//! [`CollectiveKind`]: the enum of all collectives, such as all-gather, by which ranks compare
//! their calls and errors name a collective.
use std::fmt;

/// The kind of a collective, one for each collective of [`Comm`](crate::Comm), such as all-gather.
/// Ranks exchange the variant's number to detect calls that do not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveKind {
    /// A call of [`Comm::all_gather`](crate::Comm::all_gather).
    AllGather = 1,
    /// A call of [`Comm::reduce_scatter_ordered`](crate::Comm::reduce_scatter_ordered).
    ReduceScatterOrdered,
    /// A call of [`Comm::reduce_scatter`](crate::Comm::reduce_scatter).
    ReduceScatter,
    /// A call of [`Comm::all_reduce`](crate::Comm::all_reduce).
    AllReduce,
    /// A call of [`Comm::broadcast`](crate::Comm::broadcast).
    Broadcast,
    /// A call of [`Comm::all_to_all`](crate::Comm::all_to_all).
    AllToAll,
    /// A call of [`Comm::all_gather_bytes`](crate::Comm::all_gather_bytes).
    AllGatherBytes,
    /// A call of [`Comm::barrier`](crate::Comm::barrier).
    Barrier,
    /// A call of [`Comm::shared_window`](crate::Comm::shared_window).
    SharedWindow,
}

impl CollectiveKind {
    pub(crate) const ALL: [CollectiveKind; 9] = [
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatterOrdered,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllReduce,
        CollectiveKind::Broadcast,
        CollectiveKind::AllToAll,
        CollectiveKind::AllGatherBytes,
        CollectiveKind::Barrier,
        CollectiveKind::SharedWindow,
    ];

    /// Returns the name of the collective, such as `all_gather`, which is the name of its method in
    /// [`Comm`](crate::Comm).
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::ReduceScatterOrdered => "reduce_scatter_ordered",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::Broadcast => "broadcast",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::AllGatherBytes => "all_gather_bytes",
            CollectiveKind::Barrier => "barrier",
            CollectiveKind::SharedWindow => "shared_window",
        }
    }
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
