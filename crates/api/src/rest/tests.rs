//! The document that is checked in is the one that is served.

#[test]
fn the_checked_in_document_is_the_served_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../spec/openapi.json");
    let served = super::openapi();
    if std::env::var_os("CARREL_BLESS").is_some() {
        std::fs::write(path, &served).unwrap();
    }
    let known = std::fs::read_to_string(path).unwrap_or_default();
    assert!(known == served, "the API has changed: look at it and run with CARREL_BLESS=1");
}
