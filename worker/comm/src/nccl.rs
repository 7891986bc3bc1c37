//! NCCL, found at run time: groups of ranks whose buffers lie in GPU memory.
//!
//! Every communicator is non-blocking: a call never waits inside the library, and every wait is a loop of ours that looks at
//! the library's state, at [`Group::abort`] and at the clock. So a peer that died or never came is an error, not a hang.
//!
//! Functions put work on a CUDA stream and return; [`Group::finish`] waits for it. Addresses and streams are the caller's.
mod binding;
mod comm;

use binding::{Api, Config, Handle, IN_PROGRESS, SUCCESS};
use std::{
    ffi::{CStr, c_int, c_void},
    fmt,
    path::{Path, PathBuf},
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

pub use binding::{DataType, Sum};
pub use comm::NcclComm;

/// The oldest NCCL whose non-blocking communicators are used.
const OLDEST: c_int = 21_800;
/// The first version that lets ranks share a GPU; before that they are a duplicate GPU, and refused.
const SHARES_GPUS: c_int = 23_000;
/// Between two looks at the state of a communicator, first and longest.
const FIRST_LOOK: Duration = Duration::from_micros(20);
const LONGEST_LOOK: Duration = Duration::from_millis(2);
/// Bytes of a unique id.
pub const ID_BYTES: usize = 128;

/// Why NCCL can't be used, or why work of a group ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NcclError {
    /// No library: what was tried, and each reason.
    NotFound(Vec<String>),
    /// The library lacks something.
    TooOld { path: PathBuf, what: String },
    /// A function failed, or the communicator did since.
    Call { what: String, code: i32, said: String },
    /// A peer didn't come, or work didn't end, within the limit.
    Timeout { what: String, limit: Duration },
    /// [`Group::abort`] was called; the reason is the first one given.
    Aborted(String),
    /// The ranks couldn't agree to begin.
    Meeting(String),
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NcclError::NotFound(tried) => write!(
                f,
                "NCCL (libnccl.so.2) was not found; tried: {}; install NCCL or `pip install nvidia-nccl-cu13`, or name its \
                 folder in LD_LIBRARY_PATH",
                tried.join(", ")
            ),
            NcclError::TooOld { path, what } => {
                write!(f, "{} is too old: {what}; needed: NCCL 2.18", path.display())
            }
            NcclError::Call { what, code, said } => write!(f, "{what} failed: {said} ({code})"),
            NcclError::Timeout { what, limit } => {
                write!(
                    f,
                    "{what} did not end within {} s: is a rank missing, or can't its host be reached?",
                    limit.as_secs_f32()
                )
            }
            NcclError::Aborted(reason) => write!(f, "collective aborted: {reason}"),
            NcclError::Meeting(why) => write!(f, "the ranks can't begin with NCCL: {why}"),
        }
    }
}

impl std::error::Error for NcclError {}

/// Result of an NCCL call.
pub type Result<T> = std::result::Result<T, NcclError>;

/// An open NCCL.
#[derive(Clone)]
pub struct Nccl {
    api: Arc<Api>,
    path: PathBuf,
    version: c_int,
}

impl Nccl {
    /// Opens the library from the first of these folders that has it, or from where the system's loader looks.
    pub fn open(folders: &[PathBuf]) -> Result<Nccl> {
        let mut tried = Vec::new();
        let name = PathBuf::from("libnccl.so.2");
        for path in folders.iter().map(|folder| folder.join(&name)).chain([name.clone()]) {
            // SAFETY: NCCL's start-up code has no conditions; which file that is, the machine's owner says.
            match unsafe { libloading::Library::new(&path) } {
                Ok(library) => return Nccl::of(library, path),
                Err(e) => {
                    let reason = std::error::Error::source(&e).map(ToString::to_string);
                    tried.push(reason.unwrap_or_else(|| format!("{}: {e}", path.display())));
                }
            }
        }
        Err(NcclError::NotFound(tried))
    }

    fn of(library: libloading::Library, path: PathBuf) -> Result<Nccl> {
        let api = Api::of(library).map_err(|missing| NcclError::TooOld {
            path: path.clone(),
            what: format!("it has no {missing}"),
        })?;
        let mut nccl = Nccl { api: Arc::new(api), path, version: 0 };
        let mut version = 0;
        // SAFETY: one number is written.
        let code = unsafe { (nccl.api.ncclGetVersion)(&mut version) };
        nccl.check("ncclGetVersion", code, ptr::null_mut())?;
        if version < OLDEST {
            return Err(NcclError::TooOld { path: nccl.path, what: format!("it is {}", dotted(version)) });
        }
        nccl.version = version;
        Ok(nccl)
    }

    /// Can two ranks share a GPU where `NCCL_MULTI_RANK_GPU_ENABLE=1`?
    pub fn shares_gpus(&self) -> bool {
        self.version >= SHARES_GPUS
    }

    /// `2.27.3`
    pub fn version(&self) -> String {
        dotted(self.version)
    }

    /// Only its name where the system's loader found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version and path, for people.
    pub fn describe(&self) -> String {
        format!("NCCL {} ({})", self.version(), self.path.display())
    }

    /// The id of a new group: made by one rank, told to the others.
    pub fn unique_id(&self) -> Result<[u8; ID_BYTES]> {
        let mut id = binding::UniqueId([0; ID_BYTES]);
        // SAFETY: an id is written.
        self.check("ncclGetUniqueId", unsafe { (self.api.ncclGetUniqueId)(&mut id) }, ptr::null_mut())?;
        Ok(id.0)
    }

    /// An error of a call; `comm` may be null.
    fn check(&self, what: &str, code: c_int, comm: Handle) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: texts that live as long as the library, or null; the communicator is the caller's.
        let said = unsafe {
            let text = [(self.api.ncclGetErrorString)(code), (self.api.ncclGetLastError)(comm)];
            let texts = text
                .into_iter()
                .filter(|at| !at.is_null())
                .map(|at| CStr::from_ptr(at).to_string_lossy().into_owned());
            texts.filter(|t| !t.trim().is_empty()).collect::<Vec<_>>().join(": ")
        };
        Err(NcclError::Call { what: what.to_owned(), code, said })
    }
}

fn dotted(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Waits longer each time, up to a limit in all.
struct Patience {
    until: Instant,
    limit: Duration,
    next: Duration,
}

impl Patience {
    fn new(limit: Duration) -> Self {
        Patience { until: Instant::now() + limit, limit, next: FIRST_LOOK }
    }

    fn wait(&mut self, what: &str) -> Result<()> {
        if Instant::now() >= self.until {
            return Err(NcclError::Timeout { what: what.to_owned(), limit: self.limit });
        }
        thread::sleep(self.next);
        self.next = (self.next * 2).min(LONGEST_LOOK);
        Ok(())
    }
}

/// What becomes of a communicator; behind a lock that is only held for calls that don't wait.
struct State {
    /// Null once it is given up.
    comm: Handle,
    aborted: Option<NcclError>,
}

// SAFETY: a communicator may be used from any thread, one at a time: the lock.
unsafe impl Send for State {}

/// One rank of a group.
pub struct Group {
    nccl: Nccl,
    state: Mutex<State>,
    rank: usize,
    world: usize,
    limit: Duration,
}

impl Group {
    /// Joins a group of which every rank knows the id; returns when all have come, or `others` are aborted.
    fn join(nccl: &Nccl, id: [u8; ID_BYTES], others: &dyn crate::Comm, limit: Duration) -> Result<Group> {
        let (rank, world) = (others.rank(), others.world());
        let mut comm = ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: one handle is written; the configuration says its size and version.
        let code = unsafe {
            (nccl.api.ncclCommInitRankConfig)(
                &mut comm,
                world as c_int,
                binding::UniqueId(id),
                rank as c_int,
                &mut config,
            )
        };
        let state = Mutex::new(State { comm, aborted: None });
        // from here on a failure gives the communicator up
        let group = Group { nccl: nccl.clone(), state, rank, world, limit };
        nccl.check("ncclCommInitRankConfig", code, comm)?;
        let what = format!("joining a group of {world} ranks");
        let stopped = || others.aborted().map_or(Ok(()), |reason| Err(NcclError::Aborted(reason)));
        group.settle_unless(&what, &stopped).inspect_err(|e| group.give_up(e.clone()))?;
        Ok(group)
    }

    /// The ranks meet over `others`, which decides rank and world, and an abort of which ends the wait. Either all ranks have a group
    /// or none. `limit` holds for this and for every later wait ([`Group::set_limit`]). The card that the thread's CUDA context
    /// belongs to is the rank's.
    pub fn meet(nccl: &Nccl, others: &dyn crate::Comm, limit: Duration) -> Result<Group> {
        let said = match others.rank() {
            0 => nccl.unique_id().map(|id| id.to_vec()).unwrap_or_else(|e| e.to_string().into_bytes()),
            _ => Vec::new(),
        };
        let all = others.all_gather_bytes(&said).map_err(|e| NcclError::Meeting(e.to_string()))?;
        let first = all.first().map_or(&[][..], |said| said);
        let no_id = || NcclError::Meeting(format!("rank 0 has no id: {}", String::from_utf8_lossy(first)));
        let id: [u8; ID_BYTES] = first.try_into().map_err(|_| no_id())?;
        let joined = Group::join(nccl, id, others, limit);
        let failed = joined.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let all =
            others.all_gather_bytes(failed.as_bytes()).map_err(|e| NcclError::Meeting(e.to_string()))?;
        let group = joined?;
        match all.iter().enumerate().find(|(_, why)| !why.is_empty()) {
            None => Ok(group),
            Some((rank, why)) => {
                Err(NcclError::Meeting(format!("rank {rank}: {}", String::from_utf8_lossy(why))))
            }
        }
    }

    /// The limit of every later wait.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // nothing panics while the lock is held, so a poisoned one is whole
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes every waiting and later call of this rank return [`NcclError::Aborted`], and ends its work on the card. Peers must
    /// be told by other means: NCCL doesn't. Callable from any thread.
    pub fn abort(&self, reason: &str) {
        self.give_up(NcclError::Aborted(reason.to_owned()));
    }

    fn give_up(&self, why: NcclError) {
        let mut state = self.lock();
        state.aborted.get_or_insert(why);
        let comm = std::mem::replace(&mut state.comm, ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: given up once; nothing can be done about an error.
            let _ = unsafe { (self.nccl.api.ncclCommAbort)(comm) };
        }
    }

    /// A call on the communicator, unless it was given up.
    fn call(&self, what: &str, f: impl FnOnce(&Api, Handle) -> c_int) -> Result<()> {
        let state = self.lock();
        if let Some(why) = &state.aborted {
            return Err(why.clone());
        }
        let code = f(&self.nccl.api, state.comm);
        let failed = self.nccl.check(what, code, state.comm);
        drop(state);
        failed.inspect_err(|e| self.give_up(e.clone()))
    }

    /// Is the communicator still at work? Its errors come out here.
    fn is_busy(&self, what: &str) -> Result<bool> {
        let mut said = SUCCESS;
        self.call(what, |api, comm| {
            // SAFETY: one number is written.
            let code = unsafe { (api.ncclCommGetAsyncError)(comm, &mut said) };
            if code == SUCCESS { said } else { code }
        })?;
        Ok(said == IN_PROGRESS)
    }

    /// Waits until the communicator has taken what it was given.
    fn settle(&self, what: &str) -> Result<()> {
        self.settle_unless(what, &|| Ok(()))
    }

    fn settle_unless(&self, what: &str, stopped: &dyn Fn() -> Result<()>) -> Result<()> {
        let mut patience = Patience::new(self.limit);
        while self.is_busy(what)? {
            stopped()?;
            patience.wait(what)?;
        }
        Ok(())
    }

    /// Waits for the work that was put on a stream: until `is_done` says so. Fails as soon as the library reports an error, the
    /// group is aborted, or the limit is over; then the communicator is given up and the card's kernels end.
    pub fn finish(&self, what: &str, mut is_done: impl FnMut() -> bool) -> Result<()> {
        let mut patience = Patience::new(self.limit);
        loop {
            self.is_busy(what)?;
            if is_done() {
                return Ok(());
            }
            patience.wait(what).inspect_err(|e| self.give_up(e.clone()))?;
        }
    }

    /// One function's call, and the wait until it is taken.
    fn enqueue(&self, what: &str, f: impl FnOnce(&Api, Handle) -> c_int) -> Result<()> {
        self.call(what, f)?;
        self.settle(what)
    }

    /// `recv[world · count]` becomes the ranks' `send[count]`, one after the other.
    ///
    /// # Safety
    /// The addresses cover the elements until the work is finished, in memory of this rank's card; so for all functions below.
    pub unsafe fn all_gather(
        &self,
        recv: u64,
        send: u64,
        count: usize,
        of: DataType,
        stream: Stream,
    ) -> Result<()> {
        self.enqueue("ncclAllGather", |api, comm| {
            // SAFETY: the caller's promise.
            unsafe { (api.ncclAllGather)(at(send), at(recv), count, of as c_int, comm, stream.0) }
        })
    }

    /// `recv[count]` becomes this rank's part of the ranks' sum of `send[world · count]`, in an order that NCCL chooses.
    ///
    /// # Safety
    /// As [`Group::all_gather`].
    pub unsafe fn reduce_scatter(
        &self,
        recv: u64,
        send: u64,
        count: usize,
        of: DataType,
        sum: Sum,
        stream: Stream,
    ) -> Result<()> {
        self.enqueue("ncclReduceScatter", |api, comm| {
            // SAFETY: the caller's promise.
            unsafe {
                (api.ncclReduceScatter)(at(send), at(recv), count, of as c_int, sum as c_int, comm, stream.0)
            }
        })
    }

    /// `x[count]` becomes the ranks' sum, in an order that NCCL chooses.
    ///
    /// # Safety
    /// As [`Group::all_gather`].
    pub unsafe fn all_reduce(
        &self,
        x: u64,
        count: usize,
        of: DataType,
        sum: Sum,
        stream: Stream,
    ) -> Result<()> {
        self.enqueue("ncclAllReduce", |api, comm| {
            // SAFETY: the caller's promise.
            unsafe { (api.ncclAllReduce)(at(x), at(x), count, of as c_int, sum as c_int, comm, stream.0) }
        })
    }

    /// `x[count]` becomes root's.
    ///
    /// # Safety
    /// As [`Group::all_gather`].
    pub unsafe fn broadcast(
        &self,
        x: u64,
        count: usize,
        of: DataType,
        root: usize,
        stream: Stream,
    ) -> Result<()> {
        self.enqueue("ncclBroadcast", |api, comm| {
            // SAFETY: the caller's promise.
            unsafe { (api.ncclBroadcast)(at(x), at(x), count, of as c_int, root as c_int, comm, stream.0) }
        })
    }

    /// Sends and receives that happen together: `(peer, address, elements)`; those of a pair of ranks in the order of the lists.
    /// With this every collective over unequal parts is made.
    ///
    /// # Safety
    /// As [`Group::all_gather`].
    pub unsafe fn exchange(
        &self,
        sends: &[(usize, u64, usize)],
        receives: &[(usize, u64, usize)],
        of: DataType,
        stream: Stream,
    ) -> Result<()> {
        let peers = sends.iter().chain(receives).map(|(peer, ..)| *peer);
        if let Some(peer) = peers.into_iter().find(|peer| *peer >= self.world) {
            return Err(NcclError::Meeting(format!("there is no rank {peer} in a group of {}", self.world)));
        }
        self.enqueue("ncclGroupEnd", |api, comm| {
            // SAFETY: the caller's promise. Between start and end calls only note what is to be done.
            unsafe {
                let mut code = (api.ncclGroupStart)();
                for &(peer, from, count) in sends {
                    code = worse(
                        code,
                        (api.ncclSend)(at(from), count, of as c_int, peer as c_int, comm, stream.0),
                    );
                }
                for &(peer, to, count) in receives {
                    code = worse(
                        code,
                        (api.ncclRecv)(at(to), count, of as c_int, peer as c_int, comm, stream.0),
                    );
                }
                // always ended, also after an error
                worse(code, (api.ncclGroupEnd)())
            }
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let mut state = self.lock();
        let comm = std::mem::replace(&mut state.comm, ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: given up once. Destroying would wait for work of peers that may be gone; nobody waits for ours any more.
            let _ = unsafe { (self.nccl.api.ncclCommAbort)(comm) };
        }
    }
}

/// A CUDA stream.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub *mut c_void);

fn at(address: u64) -> *mut c_void {
    address as *mut c_void
}

/// The first error of two codes, or that work goes on.
fn worse(first: c_int, second: c_int) -> c_int {
    match first {
        SUCCESS | IN_PROGRESS if second != SUCCESS => second,
        _ => first,
    }
}
