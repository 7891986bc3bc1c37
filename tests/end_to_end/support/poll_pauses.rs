//! [`PollPauses`]: the pauses of a test that looks at processes and files until a condition holds.
use std::{
    thread,
    time::{Duration, Instant},
};

const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(500);

/// Pauses between looks at a condition. Each pause is nine times as long as the look before, but at
/// most [`MAX_PAUSE`]. So waiting takes at most a tenth of a core from the programs that the test
/// waits for, unless a look takes longer than 55 ms.
pub(crate) struct PollPauses {
    look_began: Instant,
}

impl PollPauses {
    /// Returns the pauses of a test that begins to look now.
    pub(crate) fn new() -> PollPauses {
        PollPauses { look_began: Instant::now() }
    }

    /// Pauses after a look, and begins the next one.
    pub(crate) fn pause(&mut self) {
        thread::sleep((self.look_began.elapsed() * 9).clamp(MIN_PAUSE, MAX_PAUSE));
        self.look_began = Instant::now();
    }
}
