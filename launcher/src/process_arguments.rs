//! Hides secrets in the arguments of this process, which other users of the machine see in lists of
//! processes.
use jobspec::hide_secret_values;
use std::{ffi::OsString, fs, os::unix::ffi::OsStringExt};

/// Overwrites the values of secret variables in the arguments of this process with `*`, so that
/// `/proc/PID/cmdline` does not show them any more. The arguments of std change, too. Does nothing
/// if `/proc` is not readable.
///
/// # Safety
/// No other thread may read the arguments of the process during the call.
pub(crate) unsafe fn hide_secret_arguments() {
    let Some((start, length)) = find_argument_memory() else { return };
    let area = std::ptr::with_exposed_provenance_mut::<u8>(start);
    // SAFETY: the kernel placed the arguments there, on the stack of the main thread, for the life
    // of the process. No other thread reads them.
    let area = unsafe { std::slice::from_raw_parts_mut(area, length) };
    for argument in area.split_mut(|byte| *byte == 0) {
        hide_in_place(argument);
    }
}

/// Overwrites the end of an argument with `*`, beginning with the first secret value in it. Does
/// nothing if the argument contains no secret value.
fn hide_in_place(argument: &mut [u8]) {
    let hidden = hide_secret_argument(OsString::from_vec(argument.to_vec())).into_vec();
    if let Some(from) = argument.iter().zip(&hidden).position(|(a, b)| a != b) {
        argument[from..].fill(b'*');
    }
}

/// Returns a copy of an argument in which `*` replaces the values of secret variables.
pub(crate) fn hide_secret_argument(argument: OsString) -> OsString {
    match hide_secret_values(&argument.to_string_lossy()) {
        hidden if hidden == argument.to_string_lossy() => argument,
        hidden => hidden.into(),
    }
}

/// Returns the address and the length of the arguments of this process.
fn find_argument_memory() -> Option<(usize, usize)> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name in parentheses may contain spaces. The fields after the name begin with the third.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let address = |number: usize| fields.get(number - 3)?.parse::<usize>().ok();
    let (start, end) = (address(48)?, address(49)?);
    (start != 0 && end > start).then(|| (start, end - start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_found_and_hidden_in_place() {
        let (_, length) = find_argument_memory().expect("the arguments of this process");
        assert_eq!(length, fs::read("/proc/self/cmdline").expect("read").len());
        for (argument, expected) in [
            (&b"--set=run.env.HF_TOKEN=abc"[..], &b"--set=run.env.HF_TOKEN=***"[..]),
            (b"run.env.HF_TOKEN=\xff\xc3\xa9", b"run.env.HF_TOKEN=***"),
            (b"train.steps=5", b"train.steps=5"),
            (b"", b""),
        ] {
            let mut bytes = argument.to_vec();
            hide_in_place(&mut bytes);
            assert_eq!(bytes, expected);
        }
    }
}
