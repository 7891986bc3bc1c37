//! Qwen 2 and 2.5: biases of q, k and v; layers may slide.
use super::{Family, config::Fields, decoder};
use serde_json::json;

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    architecture: "Qwen2ForCausalLM",
    build: |config, tokens| {
        let f = Fields::new(config);
        let mut n = decoder::Numbers::read(&f)?;
        n.qkv_bias = true;
        n.read_sliding_layers(&f)?;
        f.only("use_mrope", &[json!(false)])?;
        f.finish()?;
        Ok(decoder::build(n, config, tokens))
    },
    describe: |spec| {
        let own = json!({"use_sliding_window": false, "sliding_window": null});
        decoder::describe(spec, "qwen2", "Qwen2ForCausalLM", own)
    },
    dropout: &[decoder::DROPOUT],
};
