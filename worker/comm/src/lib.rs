//! Crate `comm`: collectives between the ranks of a job.
//!
//! Every rank calls the same collectives in the same order. Sums have one fixed order, so results are bit-equal however
//! the ranks are spread. No call waits for ever: when the job is aborted, every waiting call returns [`CommError`].
//!
//! Three transports: [`local`] (ranks are threads of one process, for tests of a whole engine), [`shm`] (ranks are
//! processes of one node) and [`tcp`] (nodes are connected by a network; the ranks of each meet in shared memory). Every collective is also a barrier: it returns only after every rank has entered it.
use device::{Dtype, View, ViewMut};

mod call;
pub mod local;
pub mod nccl;
mod shared_window;
pub mod shm;
pub mod staged;
mod sum;
pub mod tcp;

pub use shared_window::{SharedView, SharedWindow};

/// The most bytes that one rank gives to [`Comm::all_gather_bytes`].
pub const MAX_GATHER_BYTES: usize = 16 << 20;

/// The most ranks of one group.
pub const MAX_WORLD: usize = 1024;

/// Why a collective ended without a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommError {
    /// [`Comm::abort`] was called, here or by a peer; the reason is the first one given.
    Aborted(String),
    /// The ranks did not call the same collective with fitting sizes: a bug, named.
    Mismatch(String),
    /// The transport failed.
    Io(String),
}

impl std::fmt::Display for CommError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CommError::Aborted(r) => write!(f, "collective aborted: {r}"),
            CommError::Mismatch(r) => write!(f, "ranks disagree about a collective: {r}"),
            CommError::Io(r) => write!(f, "collective failed: {r}"),
        }
    }
}

impl std::error::Error for CommError {}

/// Result of a collective.
pub type Result<T> = std::result::Result<T, CommError>;

/// Receives the pieces of [`Comm::reduce_scatter_fold`]: `(source rank, index of the partial there, piece)`. It may call
/// [`Comm::abort`] but no collective. Pieces are aligned as `f32`s, no further.
pub type Sink<'a> = dyn FnMut(usize, usize, View<'_>) + 'a;

/// Collectives of one rank. `counts[r]` is the number of elements of rank r's part; parts may be empty and unequal.
pub trait Comm: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world(&self) -> usize;

    /// `recv` becomes the ranks' `send` one after the other; `send.len() == counts[rank]`, `recv.len() == Σ counts`;
    /// elements of any type, the same on all ranks. Sums and broadcasts are of `f32`.
    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()>;

    /// Every rank gives `partials` (any number, each `Σ counts` long); rank r's `sink` sees the r-th part of each partial
    /// of each rank, in the order (rank, index). The caller folds them; nothing is summed here.
    fn reduce_scatter_fold(&self, partials: &[View], counts: &[usize], sink: &mut Sink) -> Result<()>;

    /// `recv` (`counts[rank]` long) becomes the sum over ranks of this rank's part, summed by a fixed binary tree over ranks.
    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()>;

    /// `x` becomes the sum over ranks, the same bits on every rank (fixed binary tree over ranks).
    fn all_reduce(&self, x: ViewMut) -> Result<()>;

    /// `x` becomes root's `x`.
    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()>;

    /// Rank r gets `send_counts[r]` elements from here; `recv_counts[r]` come from rank r. Elements of any type, the same on
    /// all ranks.
    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()>;

    /// Every rank's bytes, by rank. For small things (reports, errors); at most 16 MiB each.
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Memory that all ranks have in common: `counts[r]` elements of rank r, zeros at first, one rank's after the other's.
    /// Each rank writes its own and reads all; a barrier has to lie between. `None`: these ranks have none; then no rank waited.
    fn shared_window(&self, dtype: Dtype, counts: &[usize]) -> Result<Option<SharedWindow>> {
        let _ = (dtype, counts);
        Ok(None)
    }

    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// Makes every waiting and later call on every reachable rank return [`CommError::Aborted`]. Callable from any thread.
    fn abort(&self, reason: &str);

    /// Why the group was aborted, if this rank knows that it was. Waits for nobody; callable from any thread.
    fn aborted(&self) -> Option<String>;
}
