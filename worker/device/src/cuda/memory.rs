//! Memory of a card from the driver's pool, and of the host that a card knows.
use super::binding::{Address, Driver, Handle, MEMORY_POOLS, OUT_OF_MEMORY, PORTABLE, RELEASE_THRESHOLD};
use super::card::Card;
use super::error::{CudaError, Result};
use super::graphs::{Block, State};
use crate::storage::purpose;
use std::{
    ffi::{c_int, c_void},
    ptr::{self, NonNull},
    sync::{Arc, atomic::Ordering::Relaxed},
};

impl Card {
    /// Free and total bytes.
    pub(super) fn memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two numbers are written.
        self.driver.check("cuMemGetInfo", unsafe { (self.driver.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Memory that is not filled. No bytes need no memory.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Memory> {
        let memory = |at| Memory { card: self.clone(), at, bytes, scratch: false };
        if bytes == 0 {
            return Ok(memory(0));
        }
        self.enter()?;
        let ask = || {
            let _nobody_else = self.recording(); // what waits doesn't know of this memory
            self.obtain(bytes, self.stream())
        };
        let mut got = ask();
        if got == Err(OUT_OF_MEMORY) {
            // What the pool kept may be in pieces that are too small.
            self.give_up_scratch();
            self.wait()?;
            self.driver.trim(self.device)?;
            got = ask();
        }
        if got == Err(OUT_OF_MEMORY) {
            let (free, total) = self.memory()?;
            let (used, purpose) = (self.used.load(Relaxed), purpose());
            return Err(CudaError::OutOfMemory { asked: bytes, free, total, used, purpose });
        }
        got.map(memory).or_else(|code| self.driver.check("cuMemAllocAsync", code).map(|()| memory(0)))
    }

    /// Memory for the length of an op, not filled; dropped in the stream that it is used in. Where graphs are on the card's
    /// stream has the same places for the same requests.
    pub(super) fn scratch(self: &Arc<Self>, bytes: usize) -> Result<Memory> {
        if bytes > 0
            && let Some(mut state) = self.recording()
        {
            self.enter()?;
            if let Some(at) = state.place(self, bytes)? {
                return Ok(Memory { card: self.clone(), at, bytes, scratch: true });
            }
        }
        self.allocate(bytes)
    }

    /// The driver's memory, or its code.
    fn obtain(&self, bytes: usize, stream: Handle) -> std::result::Result<Address, c_int> {
        let mut at = 0;
        // SAFETY: one address is written.
        let code = unsafe { (self.driver.cuMemAllocAsync)(&mut at, bytes, stream) };
        if code != 0 {
            return Err(code);
        }
        let used = self.used.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        self.peak.fetch_max(used, Relaxed);
        Ok(at)
    }

    /// Gives back what [`Card::allocate`] gave, once the work before is done.
    pub(super) fn free(&self, at: Address, bytes: usize) {
        if self.enter().is_ok() {
            let mut recording = self.recording();
            if let Some(state) = &mut recording {
                state.flush_later(self);
            }
            self.put_back(at, bytes, self.stream());
        }
    }

    /// To the driver, in this stream's order.
    pub(super) fn put_back(&self, at: Address, bytes: usize, stream: Handle) {
        self.used.fetch_sub(bytes as u64, Relaxed);
        // SAFETY: the address came from the pool and is given back once. An error here was one of earlier work; the next
        // call says it.
        let _ = unsafe { (self.driver.cuMemFreeAsync)(at, stream) };
    }

    /// The most bytes that this process had at once.
    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }

    /// Memory of the host that the card reads and writes by itself, not filled; at least one byte.
    pub(super) fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.enter()?;
        let mut at = ptr::null_mut();
        // SAFETY: one address is written.
        let code = unsafe { (self.driver.cuMemHostAlloc)(&mut at, bytes.max(1), PORTABLE) };
        self.driver.check(&format!("cuMemHostAlloc of {bytes} bytes"), code)?;
        NonNull::new(at.cast()).ok_or_else(|| CudaError::Call {
            what: "cuMemHostAlloc".to_owned(),
            code: 0,
            said: "no address".to_owned(),
        })
    }

    /// Gives back what [`Card::allocate_pinned`] gave, which no copy uses any more.
    pub(super) fn free_pinned(&self, at: Address) {
        if self.enter().is_ok() {
            // SAFETY: given back once; nothing can be done about an error.
            let _ = unsafe { (self.driver.cuMemFreeHost)(at as *mut c_void) };
        }
    }

    /// Scratch memory of the card's stream that nobody uses goes back to the driver, whoever needs it.
    fn give_up_scratch(&self) {
        self.graphs.lock().release(self);
    }
}

impl State {
    /// A range of the scratch memory; none where the card has no room for it beside what is there.
    fn place(&mut self, card: &Card, bytes: usize) -> Result<Option<Address>> {
        if let Some(at) = self.arena.take(bytes) {
            return Ok(Some(at));
        }
        let (gone, bytes_of_block) = self.arena.growth(bytes);
        if !gone.is_empty() {
            self.flush(card)?; // it uses them
        }
        for block in gone {
            card.put_back(block.at, block.bytes, card.stream);
        }
        match card.obtain(bytes_of_block, card.stream) {
            Ok(at) => self.arena.add(Block { at, bytes: bytes_of_block }),
            Err(OUT_OF_MEMORY) => return Ok(None),
            Err(code) => return card.driver.check("cuMemAllocAsync", code).map(|()| None),
        }
        Ok(self.arena.take(bytes))
    }

    /// Takes a range back. Without graphs nobody asks for it again.
    fn give(&mut self, card: &Card, at: Address) {
        self.arena.give(at);
        if !self.is_on() {
            self.release(card);
        }
    }

    /// Gives back the blocks of scratch memory that nobody uses.
    pub(super) fn release(&mut self, card: &Card) {
        let idle = self.arena.idle();
        if !idle.is_empty() {
            self.flush_later(card);
        }
        for block in idle {
            card.put_back(block.at, block.bytes, card.stream);
        }
    }
}

impl Driver {
    /// The pool keeps what is freed: after the first steps no allocation reaches the operating system.
    pub(super) fn keep_freed_memory(&self, device: c_int) -> Result<()> {
        // SAFETY: one number is written.
        let has = self.number("cuDeviceGetAttribute", |out| unsafe {
            (self.cuDeviceGetAttribute)(out, MEMORY_POOLS, device)
        })?;
        if has == 0 {
            let what = "this GPU or its driver has no memory pools (a virtual GPU?)".to_owned();
            return Err(CudaError::TooOld { what, needed: "cuMemAllocAsync".to_owned() });
        }
        let (pool, mut all) = (self.pool(device)?, u64::MAX);
        // SAFETY: this attribute is a 64-bit number.
        let code = unsafe { (self.cuMemPoolSetAttribute)(pool, RELEASE_THRESHOLD, (&raw mut all).cast()) };
        self.check("cuMemPoolSetAttribute", code)
    }

    /// Gives back what the pool keeps and nobody uses.
    fn trim(&self, device: c_int) -> Result<()> {
        let pool = self.pool(device)?;
        // SAFETY: the device's own pool.
        self.check("cuMemPoolTrimTo", unsafe { (self.cuMemPoolTrimTo)(pool, 0) })
    }

    fn pool(&self, device: c_int) -> Result<Handle> {
        let mut pool = ptr::null_mut();
        // SAFETY: one handle is written.
        let code = unsafe { (self.cuDeviceGetDefaultMemPool)(&mut pool, device) };
        self.check("cuDeviceGetDefaultMemPool", code).map(|()| pool)
    }
}

/// Memory on a card, given back when it is dropped.
pub(super) struct Memory {
    card: Arc<Card>,
    at: Address,
    bytes: usize,
    /// Part of the scratch memory of the card's stream.
    scratch: bool,
}

impl Memory {
    pub(super) fn at(&self) -> Address {
        self.at
    }

    /// Its address, for an owner who gives it back by [`Card::free`]; not scratch.
    pub(super) fn keep(mut self) -> Address {
        self.bytes = 0;
        self.at
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.scratch {
            self.card.graphs.lock().give(&self.card, self.at);
        } else if self.bytes > 0 {
            self.card.free(self.at, self.bytes);
        }
    }
}
