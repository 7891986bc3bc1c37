//! Streams of threads, and what orders them: events.
use super::binding::{Address, Driver, Handle, NO_TIMING, NON_BLOCKING, NOT_READY};
use super::card::Card;
use super::error::Result;
use std::{
    cell::Cell,
    ffi::{c_int, c_uint},
    marker::PhantomData,
    ptr::{self, NonNull},
    sync::Arc,
};

thread_local! {
    /// This thread's own stream, and the card's stream beside which it is.
    static OWN: Cell<Option<(Handle, Handle)>> = const { Cell::new(None) };
}

impl Card {
    /// The stream of this thread's work.
    pub(super) fn stream(&self) -> Handle {
        match OWN.get() {
            Some((own, beside)) if beside == self.stream => own,
            _ => self.stream,
        }
    }

    /// What this thread asks for goes through a stream of its own from now on. Short work that others wait for: it goes first
    /// where both could.
    pub(super) fn own_stream(self: &Arc<Self>) -> Result<OwnStream> {
        self.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: two numbers are written.
        let code = unsafe { (self.driver.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) };
        self.driver.check("cuCtxGetStreamPriorityRange", code)?;
        let stream = self.driver.stream_beside(greatest)?;
        let before = OWN.replace(Some((stream, self.stream)));
        Ok(OwnStream { card: self.clone(), stream, before, here: PhantomData })
    }

    /// The end of what this thread asked for so far.
    pub(super) fn record(self: &Arc<Self>) -> Result<Event> {
        self.recorded(NO_TIMING)
    }

    /// As [`Card::record`], with the time.
    pub(super) fn record_timed(self: &Arc<Self>) -> Result<Event> {
        self.recorded(0)
    }

    fn recorded(self: &Arc<Self>, flags: c_uint) -> Result<Event> {
        self.enter()?;
        let mut event = Event { card: self.clone(), handle: ptr::null_mut() };
        // SAFETY: one handle is written.
        let code = unsafe { (self.driver.cuEventCreate)(&mut event.handle, flags) };
        self.driver.check("cuEventCreate", code)?;
        // SAFETY: event and stream live.
        let code = self.in_turn(|stream| unsafe { (self.driver.cuEventRecord)(event.handle, stream) })?;
        self.driver.check("cuEventRecord", code)?;
        Ok(event)
    }

    /// Runs `f` with another of the card's streams as this thread's.
    pub(super) fn beside<T>(&self, stream: Handle, f: impl FnOnce() -> T) -> T {
        struct Before(Option<(Handle, Handle)>);
        impl Drop for Before {
            fn drop(&mut self) {
                OWN.set(self.0);
            }
        }
        let _before = Before(OWN.replace(Some((stream, self.stream))));
        f()
    }

    /// Card to host, in its turn.
    ///
    /// # Safety
    /// Until an event behind it is reached the range of the host, as long as the card's, is neither read, written nor given
    /// back.
    pub(super) unsafe fn download_later(&self, to: NonNull<u8>, from: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let code = self.in_turn(|stream| unsafe {
            (self.driver.cuMemcpyDtoHAsync_v2)(to.as_ptr().cast(), from, bytes, stream)
        })?;
        self.driver.check("cuMemcpyDtoHAsync", code)
    }
}

impl Driver {
    /// A stream beside the card's own.
    pub(super) fn stream_beside(&self, priority: c_int) -> Result<Handle> {
        let mut stream = ptr::null_mut();
        // SAFETY: one handle is written.
        let code = unsafe { (self.cuStreamCreateWithPriority)(&mut stream, NON_BLOCKING, priority) };
        self.check("cuStreamCreateWithPriority", code)?;
        Ok(stream)
    }
}

/// A stream of the thread that made it, until it is dropped there.
pub(super) struct OwnStream {
    card: Arc<Card>,
    stream: Handle,
    before: Option<(Handle, Handle)>,
    /// It belongs to its thread.
    here: PhantomData<*const ()>,
}

impl OwnStream {
    pub(super) fn handle(&self) -> Handle {
        self.stream
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        OWN.set(self.before);
        if self.card.enter().is_ok() {
            // SAFETY: given back once; nothing can be done about an error.
            unsafe {
                let _ = (self.card.driver.cuStreamSynchronize)(self.stream);
                let _ = (self.card.driver.cuStreamDestroy_v2)(self.stream);
            }
        }
    }
}

/// A place in a stream's work.
pub(super) struct Event {
    card: Arc<Card>,
    handle: Handle,
}

// SAFETY: only passed to the driver, from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// What this thread asks for from now on waits, on the card, until the event's place is reached.
    pub(super) fn follow(&self) -> Result<()> {
        let card = &self.card;
        // SAFETY: both live.
        let code =
            card.in_turn(|stream| unsafe { (card.driver.cuStreamWaitEvent)(stream, self.handle, 0) })?;
        card.driver.check("cuStreamWaitEvent", code)
    }

    /// Waits here until the event's place is reached; errors of the work before come out here at the latest.
    pub(super) fn wait(&self) -> Result<()> {
        self.card.enter()?;
        // SAFETY: the event lives.
        let code = unsafe { (self.card.driver.cuEventSynchronize)(self.handle) };
        self.card.driver.check("work on the GPU", code)
    }

    /// Seconds from another timed event to this one, once this one is reached.
    pub(super) fn since(&self, before: &Event) -> Result<Option<f64>> {
        self.card.enter()?;
        let driver = &self.card.driver;
        // SAFETY: the event lives.
        match unsafe { (driver.cuEventQuery)(self.handle) } {
            NOT_READY => return Ok(None),
            code => driver.check("work on the GPU", code)?,
        }
        let mut ms = 0.0;
        // SAFETY: both live and are timed, and one number is written.
        let code = unsafe { (driver.cuEventElapsedTime)(&mut ms, before.handle, self.handle) };
        driver.check("cuEventElapsedTime", code)?;
        Ok(Some(f64::from(ms) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.handle.is_null() && self.card.enter().is_ok() {
            // SAFETY: given back once; streams that wait for it go on to. Nothing can be done about an error.
            let _ = unsafe { (self.card.driver.cuEventDestroy_v2)(self.handle) };
        }
    }
}
