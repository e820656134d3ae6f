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

/// Every parameter of the document, with the operation that has it.
fn parameters(document: &serde_json::Value) -> Vec<(String, serde_json::Value)> {
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let all = operation["parameters"].as_array().into_iter().flatten();
            found.extend(all.map(|parameter| (format!("{method} {path}"), parameter.clone())));
        }
    }
    found
}

#[test]
fn every_list_is_paged_and_says_how_long_a_page_may_be() {
    let document: serde_json::Value = serde_json::from_str(&super::openapi()).unwrap();
    let all = parameters(&document);
    let limits: Vec<_> = all.iter().filter(|(_, parameter)| parameter["name"] == "limit").collect();
    for (operation, parameter) in &limits {
        assert_eq!(parameter["schema"]["maximum"], super::page::MOST, "{operation}");
        let after = all.iter().any(|(same, other)| same == operation && other["name"] == "after");
        assert!(after, "{operation}: no `after`");
    }
    // Whatever answers with a page takes both.
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let body = &operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"];
            if body.as_str().is_some_and(|name| name.contains("/Page_")) {
                let named = format!("{method} {path}");
                assert!(limits.iter().any(|(operation, _)| *operation == named), "{named} is not paged");
            }
        }
    }
    assert!(limits.len() >= 8, "{limits:?}");
}
