//! Codes of errors about the command line and the terminal.

codes! {
    USAGE: Usage = "usage" {
        summary: "The command line is not valid.",
        cause: "An option is unknown, a value is missing or of the wrong form, or two options contradict each other.",
        remedy: "Run the command with --help to see what it takes.",
    }
    OUTPUT_FAILED: Failed = "output-failed" {
        summary: "Standard output is not writable.",
        cause: "The program that reads the output has ended, or the disk that the output goes to is full.",
        remedy: "Free disk space, or keep the reading program running.",
    }
}
