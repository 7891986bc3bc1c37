//! Codes of errors about runs, agents and workers.

codes! {
    INTERNAL: Failed = "internal" {
        summary: "launch reached a state that its authors considered impossible.",
        cause: "A bug of launch.",
        remedy: "Report the message, the version and the job file.",
    }
}
