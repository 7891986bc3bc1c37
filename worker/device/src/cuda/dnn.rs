//! Attention by cuDNN: a graph of operations for each shape, which the library compiles for the card.
//!
//! The operations are those that cuDNN's own frontend makes of attention: the library knows a graph by its form, and answers
//! everything else with "not supported".
mod attention;
mod choice;
mod descriptor;
mod graph;
mod plan;

use super::binding::{Dnn as Library, Handle};
use super::error::{CudaError, Result};
use super::libs::{Places, Wanted};
use crate::ops::AttentionShape;
use attention::Mask;
pub use attention::attention_bytes;
pub(super) use attention::{Operands, Pass};
pub use choice::Attention;
pub(super) use choice::Attentions;
use descriptor::Descriptor;
pub(super) use plan::Asked;
use plan::{Plan, Target};
use std::{
    ffi::{CStr, c_int},
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// The first version whose graphs hide scores by an infinite one, 9.10.
const LEAST: usize = 91_000;
/// Bytes of the longest message.
const MESSAGE: usize = 1 << 12;

/// An open cuDNN.
pub(super) struct Dnn {
    library: Arc<Library>,
    pub(super) version: usize,
    path: PathBuf,
    /// None where there is no card.
    handle: Mutex<Option<OpenHandle>>,
}

/// Used by one thread at a time.
struct OpenHandle {
    library: Arc<Library>,
    handle: Handle,
}

// SAFETY: any thread may use it, one at a time.
unsafe impl Send for OpenHandle {}

impl Drop for OpenHandle {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once.
        let _ = unsafe { (self.library.cudnnDestroy)(self.handle) };
    }
}

/// The library's version (`9.19.0`) and path. Nothing is made on a card.
pub(super) fn version(places: &Places) -> Result<(String, PathBuf)> {
    let dnn = Dnn::without_card(places)?;
    Ok((dnn.describe(), dnn.path))
}

impl Dnn {
    /// For a card, whose context must be the thread's.
    pub(super) fn open(places: &Places) -> Result<Dnn> {
        let dnn = Dnn::without_card(places)?;
        let mut handle = ptr::null_mut();
        // SAFETY: one handle is written.
        let code = unsafe { (dnn.library.cudnnCreate)(&mut handle) };
        check(&dnn.library, "cudnnCreate", code)?;
        let open = OpenHandle { library: dnn.library.clone(), handle };
        Ok(Dnn { handle: Mutex::new(Some(open)), ..dnn })
    }

    /// To make plans alone.
    fn without_card(places: &Places) -> Result<Dnn> {
        let found = places.open(Wanted::Dnn)?;
        let path = found.path.clone();
        let library = Arc::new(Library::of(found)?);
        // SAFETY: no conditions.
        let version = unsafe { (library.cudnnGetVersion)() };
        let dnn = Dnn { library, version, path, handle: Mutex::new(None) };
        if version < LEAST {
            let what = format!("{} is cuDNN {}", dnn.path.display(), dnn.describe());
            return Err(CudaError::TooOld { what, needed: "cuDNN 9.10 or newer".to_owned() });
        }
        Ok(dnn)
    }

    /// `9.19.0`
    pub(super) fn describe(&self) -> String {
        let v = self.version;
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// Plans for a pass of attention on the card, the library's best guess first; none where it can't do it.
    fn plans(&self, pass: &Pass) -> Result<impl Iterator<Item = Result<Plan>> + use<>> {
        self.with_handle(|handle| attention::plans(&self.library, pass, Target::Card(handle)))
    }

    /// What the library's plan for a pass of attention needs beside its operands, bytes, on a card of which only its properties
    /// are known (JSON, as cuDNN writes them); none where there is no plan.
    fn needs(&self, pass: &Pass, properties: &str) -> Result<Option<usize>> {
        let target = Target::Properties(Descriptor::properties(&self.library, properties)?);
        let plan = attention::plans(&self.library, pass, target)?.next().transpose()?;
        let sums = pass.sums().iter().map(|(_, elements, _)| elements * size_of::<f32>()).sum::<usize>();
        Ok(plan.map(|plan| plan.workspace + sums))
    }

    fn with_handle<T>(&self, f: impl FnOnce(Handle) -> Result<T>) -> Result<T> {
        let open = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref()
            .map_or_else(|| unreachable!("plans for a card are made where there is one"), |o| f(o.handle))
    }

    /// Puts what was asked for on a stream.
    fn run(&self, plan: &Plan, pack: &Descriptor, stream: Handle) -> Result<()> {
        self.with_handle(|handle| {
            // SAFETY: handle and stream live.
            let code = unsafe { (self.library.cudnnSetStream)(handle, stream) };
            check(&self.library, "cudnnSetStream", code)?;
            // SAFETY: plan and pack are whole; what the pack names is as large as the plan's tensors, as whoever asked promised.
            let code = unsafe { (self.library.cudnnBackendExecute)(handle, plan.handle(), pack.handle()) };
            check(&self.library, "cudnnBackendExecute", code)
        })
    }
}

/// What cuDNN's plans for the forward and the backward of attention need beside their operands, bytes, on a card that isn't here;
/// none where there is no plan. `properties` are the card's, as JSON in cuDNN's form.
pub fn attention_plans(
    places: &Places,
    properties: &str,
    shape: AttentionShape,
    window: Option<usize>,
) -> Result<[Option<usize>; 2]> {
    let dnn = Dnn::without_card(places)?;
    let mask = window.map_or(Mask::Causal, Mask::Window);
    let of = |is_backward| dnn.needs(&Pass { shape, mask, is_backward }, properties);
    Ok([of(false)?, of(true)?])
}

/// An error of the library in its own words.
fn check(library: &Library, what: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut last = vec![0u8; MESSAGE];
    // SAFETY: as many bytes as are said; the other is a text that never ends to live, or null.
    let name = unsafe {
        (library.cudnnGetLastErrorString)(last.as_mut_ptr().cast(), last.len());
        let name = (library.cudnnGetErrorString)(code);
        if name.is_null() { "an unknown error".into() } else { CStr::from_ptr(name).to_string_lossy() }
    };
    let last = CStr::from_bytes_until_nul(&last).map(CStr::to_string_lossy).unwrap_or_default();
    let said = if last.trim().is_empty() { name.into_owned() } else { format!("{name}: {}", last.trim()) };
    Err(CudaError::Call { what: what.to_owned(), code, said })
}
