//! Mistral: every layer attends to a sliding window, where `sliding_window` names one.
use super::{Family, config::Fields, decoder};
use serde_json::json;

pub(super) const FAMILY: Family = Family {
    name: "mistral",
    architecture: "MistralForCausalLM",
    build: |config, tokens| {
        let f = Fields::new(config);
        let mut n = decoder::Numbers::read(&f)?;
        n.window = f.opt_size("sliding_window")?.map(|w| w as usize);
        n.sliding.fill(n.window.is_some());
        f.finish()?;
        Ok(decoder::build(n, config, tokens))
    },
    describe: |spec| {
        decoder::describe(spec, "mistral", "MistralForCausalLM", json!({"sliding_window": null}))
    },
    dropout: &[decoder::DROPOUT],
};
