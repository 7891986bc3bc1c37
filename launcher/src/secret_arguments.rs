//! Hides secrets in the command-line arguments of this process, because other users of the machine
//! can read the arguments in process lists.
use jobspec::{hide_secret_arguments, is_value_of_secret_option};
use std::fs;

/// Overwrites the values of secret variables in the arguments of this process with `*`, so that
/// `/proc/PID/cmdline` does not show them any more. The arguments of std change, too. Does nothing
/// if `/proc` is not readable.
///
/// # Safety
/// No other thread may read the arguments of the process during the call.
pub(crate) unsafe fn overwrite_secret_arguments() {
    let Some((start, length)) = find_argument_memory() else { return };
    let area = std::ptr::with_exposed_provenance_mut::<u8>(start);
    // SAFETY: the kernel placed the arguments there, on the stack of the main thread, for the life
    // of the process. No other thread reads them.
    let area = unsafe { std::slice::from_raw_parts_mut(area, length) };
    overwrite_secrets_in_place(area);
}

/// Overwrites the secret values in the command-line arguments of a process with `*`, directly in
/// the memory of the arguments, `area`. In `area`, a zero byte follows each argument. Overwriting
/// begins at the first byte that must be hidden and continues to the end of the argument.
fn overwrite_secrets_in_place(area: &mut [u8]) {
    let words: Vec<String> =
        area.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let hidden = hide_secret_arguments(&words);
    for (i, argument) in area.split_mut(|byte| *byte == 0).enumerate() {
        let difference = words[i].bytes().zip(hidden[i].bytes()).position(|(a, b)| a != b);
        let is_hidden = words[i] != hidden[i];
        // Invalid UTF-8 is longer in `words` than in the argument.
        let from = difference.unwrap_or(hidden[i].len()).min(argument.len());
        let from = if is_value_of_secret_option(&words, i) { 0 } else { from };
        if is_hidden {
            argument[from..].fill(b'*');
        }
    }
}

/// Returns the address and the length in bytes of the memory that holds the command-line arguments
/// of this process.
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
            (b"prog\0--token\0abc\0x\0", b"prog\0--token\0***\0x\0"),
            (b"--token\0\xff*a", b"--token\0***"),
            (b"--api-key=ab\0", b"--api-key=**\0"),
            (b"", b""),
        ] {
            let mut bytes = argument.to_vec();
            overwrite_secrets_in_place(&mut bytes);
            assert_eq!(bytes, expected);
        }
    }
}
