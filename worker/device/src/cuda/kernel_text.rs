//! Removes comments and indentation from the CUDA sources at compile time, because the executable,
//! which contains the sources, is copied to every host of a job.

/// Includes a file of `kernels/` without comments and indentation: a `&'static str`. Lines keep
/// their numbers, so that messages of compilers and debuggers lead to the line of the file.
macro_rules! include_kernel_text {
    ($file:expr) => {{
        // The compiler's limit on evaluation at compile time is meant for mistakes such as endless
        // loops.
        #[allow(long_running_const_eval)]
        const LENGTH: usize = $crate::cuda::kernel_text::compact(include_str!($file), &mut []);
        #[allow(long_running_const_eval)]
        static TEXT: [u8; LENGTH] = {
            let mut compacted = [0; LENGTH];
            $crate::cuda::kernel_text::compact(include_str!($file), &mut compacted);
            compacted
        };
        const { $crate::cuda::kernel_text::to_text(&TEXT) }
    }};
}
pub(super) use include_kernel_text;

/// Copies the bytes of `source` without comments that begin with `//` and without spaces at the
/// beginning of lines to `compacted`, as far as they fit, and returns the number of these bytes.
/// Sources contain no other comments and no `"` within character literals.
pub(super) const fn compact(source: &str, compacted: &mut [u8]) -> usize {
    let source = source.as_bytes();
    let (mut length, mut i) = (0, 0);
    let (mut is_line_start, mut is_in_string) = (true, false);
    while i < source.len() {
        let byte = source[i];
        if byte == b'\n' {
            is_line_start = true;
        } else if is_line_start && byte == b' ' {
            i += 1;
            continue;
        } else {
            is_line_start = false;
        }
        if !is_in_string && byte == b'/' && i + 1 < source.len() && source[i + 1] == b'/' {
            while i < source.len() && source[i] != b'\n' {
                i += 1;
            }
            continue;
        }
        if byte == b'"' && source[i.saturating_sub(1)] != b'\\' {
            is_in_string = !is_in_string;
        }
        if length < compacted.len() {
            compacted[length] = byte;
        }
        length += 1;
        i += 1;
    }
    length
}

/// Returns the text that [`compact`] has copied.
pub(super) const fn to_text(compacted: &[u8]) -> &str {
    match std::str::from_utf8(compacted) {
        Ok(text) => text,
        Err(_) => panic!("removing comments and spaces keeps UTF-8 valid"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile::{KERNEL_HEADERS, KERNEL_SOURCES};
    use super::*;

    fn compact_to_string(source: &str) -> String {
        let mut compacted = vec![0; compact(source, &mut [])];
        compact(source, &mut compacted);
        to_text(&compacted).to_owned()
    }

    #[test]
    fn comments_and_indentation_are_removed_and_lines_keep_their_numbers() {
        let source =
            "// sums\nKERNEL f() {\n    int a = b / c; // in \"ms\"\n\n    asm(\"a // b\\\" // c\"); // d\n}";
        let expected = "\nKERNEL f() {\nint a = b / c; \n\nasm(\"a // b\\\" // c\"); \n}";
        assert_eq!(compact_to_string(source), expected);
        assert_eq!(compact_to_string("a // é"), "a ");
        assert_eq!(compact_to_string(""), "");
    }

    #[test]
    fn the_included_sources_have_the_lines_of_the_files() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels/");
        let headers = KERNEL_HEADERS.map(|(name, text)| (name.to_str().unwrap(), text));
        let sources = KERNEL_SOURCES.map(|source| (source.file, source.text));
        for (name, text) in headers.into_iter().chain(sources) {
            let file = std::fs::read_to_string(format!("{directory}{name}")).unwrap();
            assert!(!file.contains("/*"), "{name} has a comment that is not removed");
            assert!(text.len() < file.len(), "{name}");
            assert_eq!(text.lines().count(), file.lines().count(), "{name}");
            for (line, original) in text.lines().zip(file.lines()) {
                let code =
                    if original.contains('"') { original } else { original.split("//").next().unwrap() };
                let code = code.trim();
                assert!(code.starts_with(line.trim_end()), "{name}: {line} of {original}");
                assert!(original.contains("//") || line == code, "{name}: {line} of {original}");
            }
        }
    }
}
