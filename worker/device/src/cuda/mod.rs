//! The backend for NVIDIA GPUs.
//!
//! No toolkit is needed to build it and none to run it but CUDA's libraries, which are found on the machine that has the card
//! ([`libs`]). Kernels are compiled for exactly that card when they are first needed and kept on disk ([`compile`]). All work
//! that a thread asks for goes through one stream, that of the backend or the thread's own: ops return before they are done, in
//! the order of the thread's calls.
//!
//! An op can't return an error. What goes wrong on the card stops the worker with one message; with asynchronous work that
//! may be a call later than the one that caused it.
mod activation;
mod attention;
mod binding;
mod card;
mod classifier;
mod compile;
mod dnn;
mod error;
mod flat;
mod fp8;
mod graphs;
mod kept;
mod libs;
mod lists;
mod matmul;
mod memory;
mod norm;
mod ops;
mod profile;
mod rows;
mod storage;
mod streams;

pub use card::Facts;
pub use classifier::logits_bytes;
pub use dnn::{Attention, attention_bytes, attention_plans};
pub use error::{CudaError, Result};
pub use graphs::Replayed;
pub use libs::{Found, Places, Wanted};
pub use matmul::WORKSPACE;
pub use profile::Spent;

use crate::mem::{Buf, Dtype, Memory as Home, View, ViewMut};
use crate::storage::Stopped;
use binding::Address;
use card::{Card, Launch, Param};
use compile::{Kernels, Nvrtc, Source};
use dnn::Attentions;
use graphs::Trial;
use lists::Lists;
use matmul::{Product, Products};
use memory::Memory;
use profile::Profile;
use std::{
    collections::HashMap,
    ffi::CStr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread::{self, ThreadId},
};
use streams::Event;

/// Ops on one card.
pub struct Cuda {
    kernels: Kernels,
    products: Products,
    /// Where cuDNN is used.
    attentions: OnceLock<Attentions>,
    /// Of each thread and stream: a place that one thread gives another list would be another's list, too.
    lists: Mutex<HashMap<(usize, ThreadId), Lists>>,
    /// Waits of a stream for a mark that are timed and not counted yet: begin and end.
    waits: Mutex<Vec<[Event; 2]>>,
    profile: Profile,
    /// Whether graphs are faster, while that isn't known.
    trial: Mutex<Option<Trial>>,
    /// Last: fields are dropped in order, and cuBLASLt wants to be closed while there is a context.
    card: Arc<Card>,
}

/// What was found and opened for a card, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libraries {
    /// NVRTC's version and path.
    pub compiler: ((u32, u32), PathBuf),
    /// cuBLASLt's version (130100 is 13.1.0) and path.
    pub blas: (usize, PathBuf),
}

impl Home for Card {
    fn take_back(&self, address: u64, bytes: usize) {
        self.free(address, bytes);
    }
}

/// Memory of the host that a card knows.
struct Pinned(Arc<Card>);

impl Home for Pinned {
    fn take_back(&self, address: u64, _: usize) {
        self.0.free_pinned(address);
    }
}

impl Cuda {
    /// Opens card `index` of those that this process is shown, with every library that training needs. Compiled kernels are
    /// kept in `cache`.
    pub fn open(places: &Places, index: usize, cache: Option<PathBuf>) -> Result<Cuda> {
        let card = Card::open(places, index)?;
        let places = &places.of_driver(card.facts.driver.0);
        let kernels = Kernels::new(Nvrtc::open(places)?, &card, cache)?;
        card.enter()?;
        let products = Products::open(places)?;
        let (lists, waits, trial) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (profile, attentions) = (Profile::default(), OnceLock::new());
        Ok(Cuda { kernels, products, attentions, lists, waits, profile, trial, card })
    }

    /// The card.
    pub fn facts(&self) -> &Facts {
        &self.card.facts
    }

    /// The libraries.
    pub fn libraries(&self) -> Libraries {
        let nvrtc = self.kernels.nvrtc();
        Libraries {
            compiler: (nvrtc.version, nvrtc.path.clone()),
            blas: (self.products.version, self.products.path.clone()),
        }
    }

    /// Free and total bytes of the card's memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.card.memory()
    }

    /// Name and architecture, for the log: `NVIDIA H100 80GB HBM3, sm_90`.
    pub fn describe(&self) -> String {
        format!("{}, {}", self.card.facts.name, self.card.facts.arch())
    }

    /// Refuses a card whose tensor cores have no fp8.
    pub fn check_fp8(&self) -> Result<()> {
        let facts = self.facts();
        if facts.has_fp8() {
            return Ok(());
        }
        let what = format!("GPU {} ({}) is {}", facts.index, facts.name, facts.arch());
        Err(CudaError::TooOld { what, needed: "sm_89 (Ada) or newer for products in fp8".to_owned() })
    }

    /// Compiles and loads every kernel now, so that no step waits for it.
    pub fn warm_up(&self) -> Result<()> {
        self.kernels.load_all(&self.card)
    }

    /// From now on the fastest algorithm for each product is found by the clock and kept beside the kernels. Which one that is may
    /// differ from card to card and from host to host, and with it the last bits of products.
    pub fn time_products(&self) {
        self.products.time_algorithms(&self.card, self.kernels.folder());
    }

    /// Says whose kernels attention is computed by from now on; cuDNN is looked for in `places`. Asked for once. Where it goes
    /// without a cuDNN that is there, why.
    pub fn choose_attention(&self, how: Attention, places: &Places) -> Result<Option<String>> {
        self.card.enter()?;
        match Attentions::open(how, &places.of_driver(self.card.facts.driver.0)) {
            Ok(opened) => opened.into_iter().for_each(|attentions| drop(self.attentions.set(attentions))),
            Err(error) if how == Attention::Dnn => return Err(error),
            Err(CudaError::NotFound { failed, .. }) if failed.is_empty() => {}
            Err(error) => return Ok(Some(error.to_string())),
        }
        Ok(None)
    }

    /// Why compiled kernels aren't kept for the next process, where they should have been.
    pub fn unkept_kernels(&self) -> Option<&str> {
        self.kernels.unkept()
    }

    /// `len` zeros in the card's memory, or why there are none.
    pub fn try_zeroed(&self, dtype: Dtype, len: usize) -> Result<Buf> {
        let buf = self.unfilled(dtype, len)?;
        self.card.fill_zero(buf.view().address(), len * dtype.size())?;
        Ok(buf)
    }

    /// Makes the card's context the calling thread's, for libraries that work on it.
    pub fn enter(&self) -> Result<()> {
        self.card.enter()
    }

    /// The stream that this thread's work goes through (a `CUstream`), with everything in it that the thread asked for.
    pub fn stream(&self) -> *mut std::ffi::c_void {
        must(self.card.in_turn(|stream| stream))
    }

    /// Waits until everything that this thread asked for is done; fails with what failed of it.
    pub fn try_wait(&self) -> Result<()> {
        self.card.wait()
    }

    fn unfilled(&self, dtype: Dtype, len: usize) -> Result<Buf> {
        let memory = self.card.allocate(len.saturating_mul(dtype.size()))?;
        Ok(Buf::on(self.card.clone(), memory.keep(), dtype, len))
    }

    // --- for the ops ------------------------------------------------------------------------------------------------

    /// Memory for the length of an op.
    fn scratch(&self, bytes: usize) -> Memory {
        must(self.card.scratch(bytes))
    }

    /// Where numbers of the host lie on the card, for the length of an op, which asks for one list of a name. What was sent lately
    /// is there still: sending can cost a wait for the work before.
    fn numbers<T: bytemuck::Pod>(&self, name: &'static str, numbers: &[T]) -> Address {
        let mut all = self.lists();
        let lists = all.entry((self.card.stream().addr(), thread::current().id())).or_default();
        must(lists.place(&self.card, name, bytemuck::cast_slice(numbers)))
    }

    fn lists(&self) -> MutexGuard<'_, HashMap<(usize, ThreadId), Lists>> {
        // a panic leaves the lists whole
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a kernel; a launch without blocks is none.
    fn launch(&self, source: Source, name: &'static CStr, shape: Launch, arguments: &[&dyn Param]) {
        if shape.grid.contains(&0) {
            return;
        }
        let function = must(self.kernels.get(&self.card, source, name, shape.shared));
        // SAFETY: each op passes its kernel's arguments, views as long as its shape says.
        let launch = || unsafe { self.card.launch(name, function, shape, arguments) };
        self.piece(|| name.to_string_lossy().into_owned(), launch);
    }

    /// Can the library do this product?
    fn suits(&self, p: &Product) -> bool {
        must(self.products.suits(&self.card, p))
    }

    /// Asks for a product.
    fn multiply(&self, p: &Product) {
        self.piece(|| p.describe(), || self.products.run(&self.card, p));
    }

    /// A kernel over all elements of a flat vector, each thread at one at a time.
    fn each(&self, source: Source, name: &'static CStr, len: usize, arguments: &[&dyn Param]) {
        let blocks = len.div_ceil(THREADS).min(self.card.facts.multiprocessors * 16) as u32;
        self.launch(
            source,
            name,
            Launch { grid: [blocks, 1, 1], block: [THREADS as u32, 1, 1], shared: 0 },
            arguments,
        );
    }

    /// The same for a kernel whose threads take eight elements at a time.
    fn each_eight(&self, source: Source, name: &'static CStr, len: usize, arguments: &[&dyn Param]) {
        self.each(source, name, len.div_ceil(8), arguments);
    }

    /// A kernel with a block per row of about `width` elements, eight of them to a thread.
    fn each_row(
        &self,
        source: Source,
        name: &'static CStr,
        rows: usize,
        width: usize,
        arguments: &[&dyn Param],
    ) {
        let grid = [u32::try_from(rows).unwrap_or_else(|_| panic!("{name:?}: {rows} rows")), 1, 1];
        self.launch(source, name, Launch { grid, block: [threads(width), 1, 1], shared: 0 }, arguments);
    }

    /// The same for a kernel that gives a short row a warp instead, and several of them a block.
    fn each_short_row(
        &self,
        source: Source,
        name: &'static CStr,
        rows: usize,
        width: usize,
        arguments: &[&dyn Param],
    ) {
        if threads(width) > 32 {
            return self.each_row(source, name, rows, width, arguments);
        }
        let blocks = rows.div_ceil(THREADS / 32);
        let grid = [u32::try_from(blocks).unwrap_or_else(|_| panic!("{name:?}: {rows} rows")), 1, 1];
        let block = [32, THREADS as u32 / 32, 1];
        self.launch(source, name, Launch { grid, block, shared: 0 }, arguments);
    }
}

/// Is each of these of its type and at 16 bytes, in rows of whole eights? Then a kernel whose name ends in the type may be taken.
fn eights(width: usize, tensors: &[(Tensor, Dtype)]) -> bool {
    let is_whole =
        |(tensor, dtype): &(Tensor, Dtype)| tensor.at.is_multiple_of(16) && tensor.dtype == number(*dtype);
    width.is_multiple_of(8) && tensors.iter().all(is_whole)
}

/// Most threads of a block, where a kernel asks for nothing else.
const THREADS: usize = 256;

/// Threads for a row, eight elements each: whole warps.
fn threads(width: usize) -> u32 {
    width.div_ceil(8).next_multiple_of(32).clamp(32, THREADS) as u32
}

/// Is there a driver that sees a GPU, and every library that training on it needs? No GPU is opened.
pub fn find(places: &Places) -> Result<()> {
    let (driver, _) = card::find(places)?;
    let places = places.of_driver(driver);
    places.open(Wanted::Compiler)?;
    places.open(Wanted::Blas)?;
    Ok(())
}

/// Version and path of each library that training on one GPU opens, by a short name, or why it can't be used.
/// Attention by cuDNN is the one that isn't needed.
pub fn libraries(places: &Places) -> [(&'static str, Result<(String, PathBuf)>); 4] {
    let driver = card::version(places);
    let places = &driver.as_ref().map_or_else(|_| places.clone(), |((major, _), _)| places.of_driver(*major));
    let driver = driver.map(|((major, minor), path)| (format!("CUDA {major}.{minor}"), path));
    let compiler = Nvrtc::open(places).map(|nvrtc| {
        let (major, minor) = nvrtc.version;
        (format!("{major}.{minor}"), nvrtc.path.clone())
    });
    [
        ("driver", driver),
        ("NVRTC", compiler),
        ("cuBLASLt", matmul::version(places)),
        ("cuDNN", dnn::version(places)),
    ]
}

/// The images of all kernels for an architecture (`sm_90`), whatever card this machine has or lacks.
pub fn compile_all(places: &Places, arch: &str) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let nvrtc = Nvrtc::open(places)?;
    compile::SOURCES.iter().map(|source| Ok((source.file, nvrtc.compile(*source, arch)?))).collect()
}

/// What went wrong stops the worker, which says it.
#[track_caller]
fn must<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|e| std::panic::panic_any(Stopped(e.to_string())))
}

/// An argument in the card's memory with its type, as kernels take it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Tensor {
    at: Address,
    dtype: i64,
}

// SAFETY: struct Tensor of common.cuh.
unsafe impl Param for Tensor {}

impl Tensor {
    /// Not given.
    const NONE: Tensor = Tensor { at: 0, dtype: 0 };
}

impl From<View<'_>> for Tensor {
    #[track_caller]
    fn from(v: View) -> Self {
        Tensor { at: address(v), dtype: number(v.dtype()) }
    }
}

impl From<&ViewMut<'_>> for Tensor {
    #[track_caller]
    fn from(v: &ViewMut) -> Self {
        v.as_view().into()
    }
}

/// As common.cuh numbers the types.
fn number(dtype: Dtype) -> i64 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

#[track_caller]
fn address(v: View) -> Address {
    assert!(!v.is_on_host() || v.is_empty(), "a buffer in the host's memory is used as a GPU's");
    v.address()
}

/// The address of a view of `f32`.
#[track_caller]
fn floats(v: View) -> Address {
    assert!(v.dtype() == Dtype::F32, "a buffer of {:?} is used as f32", v.dtype());
    address(v)
}

/// Stops the program when an argument doesn't have the length that the shape demands.
#[track_caller]
fn expect_len(op: &str, name: &str, len: usize, want: usize) {
    assert!(len == want, "{op}: {name} has {len} elements, the shape asks for {want}");
}
