# Up to Python 3.9 a function uses its caller's builtins if both have the same globals; this caller has others.
eval("serve()", {"serve": serve})
